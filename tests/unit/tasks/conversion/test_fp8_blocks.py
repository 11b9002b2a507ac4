"""Directories quantised to fp8 in blocks: the weights are blocks times scales, and what does not fit is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.fp8_blocks import Block, dequantize_blocks
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.published_model import write_published_model

FP8, LARGEST, SMALLEST = torch.float8_e4m3fn, 448.0, 2.0**-9
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "deepseek_v3": EXPERTS
    | {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 9,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
}
QUERY = "model.layers.0.self_attn.q_proj.weight"  # 144 x 144


def quantize(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """A matrix as fp8 with one scale a block, by the definition."""
    rows, columns = (-(-length // size) for length, size in zip(weight.shape, block, strict=True))
    quantized, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            scales[row, column] = weight[place].abs().max() / LARGEST
            quantized[place] = (weight[place] / scales[row, column]).to(FP8)
    return quantized, scales


def by_hand(quantized: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Element by element the product in fp32, rounded to bf16."""
    rows, columns = (
        torch.arange(length) // size for length, size in zip(quantized.shape, block, strict=True)
    )
    return (quantized.float() * scales.float()[rows][:, columns]).bfloat16()


def write_quantized(
    directory: Path,
    model_type: str,
    block: Block,
    scale_dtype: torch.dtype = torch.float32,
    **stated: object,
) -> dict[str, Tensor]:
    """A published fp8 directory of a tiny model in bf16, and the weights that it stands for."""
    write_published_model(directory, model_type=model_type, **SIZES[model_type])
    meant: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith("_proj.weight") or name.endswith("_with_mqa.weight"):
            stored[name], scales = quantize(tensor, block)
            stored[f"{name}_scale_inv"] = scales = scales.to(scale_dtype)
            meant[name] = by_hand(stored[name], scales, block)
        else:
            bias = name.endswith("e_score_correction_bias")  # fp32 in published files
            meant[name] = stored[name] = tensor if bias else tensor.bfloat16()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    fields = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    edit_config(directory, quantization_config=fields | stated, dtype="bfloat16")
    return meant


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_quantized(directory, "qwen3", (64, 64))
    return directory


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def import_and_export(directory: Path, place: Path) -> dict[str, Tensor]:
    """The weights that come out again, under their published names."""
    import_model(str(directory), place / "checkpoint", place / "cache")
    assert load_checkpoint(place / "checkpoint").weights
    export_model(place / "checkpoint", place / "out", name="x", lineage=[], dtype=None)
    return load_file(place / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((1, 1), (128, 128)),
        ((128, 256), (128, 128)),
        ((129, 127), (128, 128)),
        ((300, 257), (128, 128)),
        ((50, 70), (16, 24)),
    ],
)
def test_dequantised_blocks_are_as_near_as_their_formats_allow(
    shape: tuple[int, int], block: Block
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1).exp()
    quantized, scales = quantize(weight, block)
    result = dequantize_blocks(quantized, scales, block)
    assert torch.equal(result, by_hand(quantized, scales, block))
    rows, columns = (torch.arange(n) // size for n, size in zip(shape, block, strict=True))
    # half a unit in the last place: of e4m3's 3 bits or its smallest step, then of bf16's 7 bits
    step = torch.maximum(weight.abs() * 2.0**-4, scales[rows][:, columns] * SMALLEST / 2)
    bound = step + (weight.abs() + step) * 2.0**-8
    assert bool(((result.float() - weight).abs() <= bound).all())


def test_every_value_of_fp8_times_a_power_of_two_is_exact() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8)
    values = values[values.float().isfinite()].reshape(2, 127)
    scales = torch.tensor([[2.0**-20, 4.0], [1.0, 2.0**-3]])
    wanted = values.double() * scales.double()[:, torch.arange(127) // 100]
    assert torch.equal(dequantize_blocks(values, scales, (1, 100)).double(), wanted)


@pytest.mark.parametrize(
    ("model_type", "block", "dtype", "stated"),
    [
        ("qwen3", (128, 128), torch.bfloat16, {"modules_to_not_convert": ["lm_head"]}),
        ("qwen3", (40, 56), torch.float16, {}),
        ("qwen3_moe", (20, 128), torch.float32, {"ignored_layers": None, "fmt": None}),
        ("deepseek_v3", (128, 128), torch.float32, {"scale_fmt": "ue8m0"}),
        ("deepseek_v3", (20, 28), torch.float32, {}),
    ],
)
def test_imported_weights_are_blocks_times_scales(
    model_type: str,
    block: Block,
    dtype: torch.dtype,
    stated: dict[str, object],
    tmp_path: Path,
) -> None:
    meant = write_quantized(tmp_path / "in", model_type, block, dtype, **stated)
    found = import_and_export(tmp_path / "in", tmp_path)
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    for place in ("out", "checkpoint/published"):
        assert "quantization_config" not in json.loads(
            (tmp_path / place / "config.json").read_text()
        )


def test_draft_layer_behind_the_last_is_left_out_with_its_scales(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path / "in", "deepseek_v3", (16, 16))
    weights = tmp_path / "in" / "model.safetensors"
    stored = load_file(weights)
    last, behind = "model.layers.2.", "model.layers.3."
    draft = {
        name.replace(last, behind): tensor.clone()
        for name, tensor in stored.items()
        if name.startswith(last)
    }
    draft |= {
        f"{behind}eh_proj.weight": torch.ones(144, 288),
        f"{behind}hnorm.weight": torch.ones(9),
    }
    assert f"{behind}self_attn.o_proj.weight_scale_inv" in draft
    save_file(stored | draft, weights)
    found = import_and_export(tmp_path / "in", tmp_path)
    assert found.keys() == meant.keys()


def test_weights_that_were_dequantised_beside_an_old_configuration_are_read(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path / "in", "qwen3", (128, 128))
    save_file(meant, tmp_path / "in" / "model.safetensors")
    found = import_and_export(tmp_path / "in", tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in meant.items())


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_transformers_dequantises_to_the_same_weights(model_type: str, tmp_path: Path) -> None:
    # blocks that divide every width: transformers infers their size from the number of scales
    write_quantized(tmp_path / "in", model_type, (16, 16))
    import_and_export(tmp_path / "in", tmp_path)
    kind, reads = transformers.AutoModelForCausalLM, transformers.FineGrainedFP8Config
    theirs = kind.from_pretrained(
        tmp_path / "in",
        dtype=torch.bfloat16,
        quantization_config=reads(weight_block_size=(16, 16), dequantize=True),
    ).state_dict()
    ours = kind.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype, name
        assert torch.equal(theirs[name], tensor), name


Damage = Callable[[dict[str, Tensor]], dict[str, Tensor]]
FILE = r"model\.safetensors: tensor "
SCALES = QUERY.replace(".", r"\.") + "_scale_inv"
BAD_TENSORS: dict[str, tuple[Damage, str]] = {
    "no scale": (
        lambda stored: {k: v for k, v in stored.items() if k != f"{QUERY}_scale_inv"},
        FILE + r".*q_proj\.weight \(144, 144\) has dtype F8_E4M3, but there is no "
        rf"{SCALES}, wanted one of shape \(3, 3\)",
    ),
    "a row of scales too few": (
        lambda stored: stored | {f"{QUERY}_scale_inv": torch.ones(2, 3)},
        FILE + rf"{SCALES} has shape \(2, 3\) and dtype torch\.float32, wanted \(3, 3\)",
    ),
    "one scale for all": (
        lambda stored: stored | {f"{QUERY}_scale_inv": torch.ones(())},
        FILE + rf"{SCALES} has shape \(\) .*, wanted \(3, 3\)",
    ),
    "scales in fp8": (
        lambda stored: stored | {f"{QUERY}_scale_inv": torch.ones(3, 3).to(FP8)},
        FILE + rf"{SCALES} .* dtype torch\.float8_e4m3fn, wanted \(3, 3\) of F32, BF16 or F16",
    ),
    "scales as exponents": (
        lambda stored: stored | {f"{QUERY}_scale_inv": torch.ones(3, 3, dtype=torch.uint8)},
        FILE + rf"{SCALES} has dtype U8, wanted one of F32, BF16, F16, F8_E4M3",
    ),
    "scales of nothing": (
        lambda stored: {k: v for k, v in stored.items() if k != QUERY},
        FILE + rf"{SCALES} holds scales, but .*q_proj\.weight is missing, wanted it as F8_E4M3",
    ),
    "scales of a matrix in bf16": (
        lambda stored: stored | {QUERY: torch.ones(144, 144).bfloat16()},
        FILE + rf"{SCALES} holds scales, but .* is of dtype torch\.bfloat16, wanted it as F8_E4M3",
    ),
    "a norm in fp8": (
        lambda stored: stored | {"model.norm.weight": torch.ones(144).to(FP8)},
        FILE + r"model\.norm\.weight \(144,\) has dtype F8_E4M3, wanted a matrix",
    ),
    "another fp8": (
        lambda stored: stored | {QUERY: torch.ones(144, 144).to(torch.float8_e5m2)},
        FILE + r".*q_proj\.weight has dtype F8_E5M2, wanted one of F32, BF16, F16, F8_E4M3",
    ),
}


@pytest.mark.parametrize("how", BAD_TENSORS)
@pytest.mark.sampled(5)
def test_matrices_and_scales_that_do_not_fit_are_refused(
    how: str, published: Path, tmp_path: Path
) -> None:
    damage, wanted = BAD_TENSORS[how]
    shutil.copytree(published, tmp_path / "in")
    weights = tmp_path / "in" / "model.safetensors"
    save_file(damage(load_file(weights)), weights)
    refuse(tmp_path, wanted)


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        (
            None,
            r"dtype F8_E4M3, but config\.json has no quantization_config, wanted one that states",
        ),
        ("fp8", r"quantization_config = 'fp8', wanted an object"),
        ({"quant_method": "gptq"}, r"quant_method = 'gptq', wanted 'fp8'"),
        ({"quant_method": "awq"}, r"quant_method = 'awq', wanted 'fp8'"),
        ({"quant_method": "bitsandbytes"}, r"quant_method = 'bitsandbytes', wanted 'fp8'"),
        ({"quant_method": "compressed-tensors"}, r"= 'compressed-tensors', wanted 'fp8'"),
        ({"fmt": "e5m2"}, r"quantization_config\.fmt = 'e5m2', wanted 'e4m3'"),
        ({"activation_scheme": "static"}, r"activation_scheme = 'static', wanted 'dynamic'"),
        ({"expert_dtype": "fp4"}, r"expert_dtype = 'fp4', wanted 'fp8'"),
        ({"scale_fmt": "e5m3"}, r"scale_fmt = 'e5m3', wanted 'float' or 'ue8m0'"),
        ({"rotation": 1}, r"rotation = 1, wanted no such field: it is not understood"),
        (
            {"weight_block_size": None},
            r"weight_block_size = None, wanted two positive whole numbers",
        ),
        ({"weight_block_size": [128]}, r"weight_block_size = \[128\], wanted two positive"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size = \[128, 0\], wanted two positive"),
    ],
)
@pytest.mark.sampled(5)
def test_other_quantisations_are_refused_by_field(
    stated: object, wanted: str, published: Path, tmp_path: Path
) -> None:
    shutil.copytree(published, tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    known = config["quantization_config"]
    edit_config(
        tmp_path / "in", quantization_config=known | stated if isinstance(stated, dict) else stated
    )
    refuse(tmp_path, wanted)


def refuse(place: Path, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        import_model(str(place / "in"), place / "work" / "checkpoint", place / "cache")
    assert not list(place.glob("work/*"))
