"""GGUF in: tensor by tensor, what transformers reads from the whole file at once."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFEndian, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.gguf_writing import GGUF_FILE
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.conversion.sources import open_source
from tests.fakes.gguf_files import Change, rewrite_gguf
from tests.fakes.published_model import write_published_model

WIDTHS = {"hidden_size": 160, "num_attention_heads": 10, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNTIED = {"tie_word_embeddings": False}
FAMILIES = {
    "llama": {},
    "qwen2": UNTIED,
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "qwen3": UNTIED,
}


def write_files(folder: Path, model_type: str, **fields: Any) -> Path:
    """A directory of the Hugging Face layout with a GGUF file of the same model."""
    published, out = folder / "published", folder / "out"
    write_published_model(published, model_type=model_type, **fields)
    import_model(str(published), folder / "checkpoint", folder / "cache")
    export_model(folder / "checkpoint", out, name="x", lineage=[], dtype=None, with_gguf=True)
    return out


def quantised() -> Change:
    """Each matrix in the next of the block formats that gguf writes, vectors as they are."""
    kinds: Iterator[Kind] = cycle(
        [Kind.Q4_0, Kind.Q8_0, Kind.F16, Kind.Q5_1, Kind.BF16, Kind.Q4_1, Kind.Q5_0]
    )

    def change(_: str, rows: np.ndarray) -> tuple[np.ndarray, Kind]:
        kind = next(kinds) if rows.ndim > 1 else Kind.F32
        return quantize(rows, kind), kind

    return change


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.sampled(2)
def test_blocks_become_the_values_that_transformers_makes_of_them(
    model_type: str, tmp_path: Path
) -> None:
    out = write_files(tmp_path, model_type, **(WIDTHS | FAMILIES[model_type]))
    mixed = tmp_path / "mixed.gguf"
    rewrite_gguf(out / GGUF_FILE, mixed, quantised())
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(out)
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(mixed), return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"], strict=False, assign=True)
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(str(mixed), tmp_path / "again", tmp_path / "cache")
    export_model(tmp_path / "again", tmp_path / "ours", name="x", lineage=[], dtype=None)
    wanted, seen = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert seen.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == seen[name].dtype == torch.float32
        assert torch.equal(tensor, seen[name]), name


# ru_maxrss begins with that of the process which started this one
PEAK = """
import re, sys
from pathlib import Path
from ostinato.tasks.conversion.importing import import_model

def peak_after(name):
    import_model(str(folder / name / "out" / "model.gguf"), folder / "again", folder / "cache")
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

folder = Path(sys.argv[1])
small = peak_after("small")
print(peak_after("large") - small)
"""


@pytest.mark.nightly
def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    write_files(tmp_path / "small", "llama")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 13}
    out = write_files(tmp_path / "large", "llama", **sizes, **heads)
    whole, one = (out / GGUF_FILE).stat().st_size, 4 * 512 * 2048
    assert whole > 39 * one
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(answer.stdout) < whole // 2


def without(ending: str) -> Change:
    return lambda name, rows: None if name.endswith(ending) else (rows, Kind.F32)


def changed(ending: str, rows: np.ndarray, kind: Kind = Kind.F32) -> Change:
    return lambda name, old: (rows, kind) if name.endswith(ending) else (old, Kind.F32)


NORM, EXPERT = "blk.1.ffn_norm.weight", "blk.1.ffn_up_exps.weight"
HALF = np.zeros((4, 16, 160), np.float32)
FAULTS: dict[str, tuple[Change, str]] = {
    "no norm": (
        without(NORM),
        r"has no tensor model\.layers\.1\.post_attention_layernorm\.weight, wanted one of shape \(160,\)",
    ),
    "no expert's up matrix": (
        without(EXPERT),
        r"has no tensor model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight, wanted one of shape \(32, 160\)",
    ),
    "a norm of another width": (
        changed(NORM, np.ones(7, np.float32)),
        r"x\.gguf: tensor model\.layers\.1\.post_attention_layernorm\.weight has shape \(7,\), "
        r"wanted \(160,\)",
    ),
    "half of each expert": (
        changed(EXPERT, HALF),
        r"x\.gguf: tensor model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight has shape \(16, 160\), "
        r"wanted \(32, 160\)",
    ),
    "an expert too few": (
        changed(EXPERT, np.zeros((3, 32, 160), np.float32)),
        r"has no tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight",
    ),
    "experts without rows": (
        changed(EXPERT, np.ones(4, np.float32)),
        r"experts\.0\.up_proj\.weight has shape \(\), wanted \(32, 160\)",
    ),
    "numbers that are no weights": (
        changed(NORM, np.ones(160, np.int32), Kind.I32),
        r"x\.gguf: tensor blk\.1\.ffn_norm\.weight is stored as I32, wanted one of F32, F16, .*Q4_K",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(3)
def test_a_faulty_tensor_is_named_and_nothing_is_left(fault: str, tmp_path: Path) -> None:
    change, says = FAULTS[fault]
    out = write_files(tmp_path, "qwen3_moe", **(WIDTHS | FAMILIES["qwen3_moe"]))
    rewrite_gguf(out / GGUF_FILE, tmp_path / "x.gguf", change)
    with pytest.raises(ConfigError, match=says):
        import_model(str(tmp_path / "x.gguf"), tmp_path / "work" / "again", tmp_path / "cache")
    assert not list(tmp_path.glob("work/*"))


def stored_kind(path: Path, name: str, kind: int) -> None:
    """Says in the file's header that a tensor is stored in another form."""
    content = bytearray(path.read_bytes())
    place = content.index(name.encode()) + len(name)
    rank = int.from_bytes(content[place : place + 4], "little")
    place += 4 + 8 * rank
    content[place : place + 4] = kind.to_bytes(4, "little")
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (999, r"model\.gguf: tensor blk\.1\.ffn_norm\.weight is stored as 999, wanted one of F32"),
        (
            Kind.Q4_K,
            r"model\.gguf: tensor blk\.1\.ffn_norm\.weight has rows of 144 values, wanted a multiple of "
            r"256, the block of Q4_K",
        ),
    ],
)
def test_a_form_that_cannot_be_is_named(kind: int, says: str, tmp_path: Path) -> None:
    out = write_files(tmp_path, "llama")
    stored_kind(out / GGUF_FILE, "blk.1.ffn_norm.weight", kind)
    with pytest.raises(ConfigError, match=says):
        import_model(str(out / GGUF_FILE), tmp_path / "work" / "again", tmp_path / "cache")
    assert not list(tmp_path.glob("work/*"))


def test_a_table_of_rotations_is_not_passed_over(tmp_path: Path) -> None:
    """llama.cpp reads one of a llama only."""
    out = write_files(tmp_path, "qwen2", **UNTIED)
    table = {"rope_freqs.weight": np.full(8, 2.0, np.float32)}
    rewrite_gguf(out / GGUF_FILE, tmp_path / "x.gguf", more=table)
    says = r"x\.gguf: tensor rope_freqs\.weight \(8,\) is not part of a qwen2"
    with pytest.raises(ConfigError, match=says):
        import_model(str(tmp_path / "x.gguf"), tmp_path / "work" / "again", tmp_path / "cache")
    assert not list(tmp_path.glob("work/*"))


def test_a_file_of_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"x\.gguf is a big-endian GGUF file, wanted a little"):
        import_model(str(tmp_path / "x.gguf"), tmp_path / "work" / "again", tmp_path / "cache")


def test_a_file_that_is_cut_meanwhile_names_the_tensor(tmp_path: Path) -> None:
    path = write_files(tmp_path, "llama") / GGUF_FILE
    with open_source(str(path), tmp_path / "cache", tmp_path) as source:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(
            ConfigError, match=r"model\.gguf: tensor output_norm\.weight cannot be read"
        ):
            source.fetch("model.norm.weight")


@pytest.mark.parametrize("drift", [0.0, 0.3, None], ids=["copy", "trained on", "another"])
def test_a_second_quantised_copy_of_the_embedding_is_one_tied_matrix(
    drift: float | None, tmp_path: Path
) -> None:
    out = write_files(tmp_path, "qwen2", hidden_size=64, tie_word_embeddings=True)
    embedding: dict[str, np.ndarray] = {}

    def round_embedding(name: str, rows: np.ndarray) -> tuple[np.ndarray, Kind]:
        if name != "token_embd.weight":
            return rows, Kind.F32
        embedding["exact"] = rows
        return quantize(rows, Kind.Q5_0), Kind.Q5_0

    rewrite_gguf(out / GGUF_FILE, tmp_path / "rounded.gguf", round_embedding)
    output = embedding["exact"]
    if drift is None:
        output = output[::-1]
    elif drift:
        noise = np.random.default_rng(0).normal(scale=drift * output.std(), size=output.shape)
        output = output + noise.astype(np.float32)
    rewrite_gguf(
        out / GGUF_FILE,
        tmp_path / "two.gguf",
        round_embedding,
        more={"output.weight": np.ascontiguousarray(output)},
    )
    facts = import_model(str(tmp_path / "two.gguf"), tmp_path / "tied", tmp_path / "cache")
    once = import_model(str(tmp_path / "rounded.gguf"), tmp_path / "once", tmp_path / "cache")
    if drift != 0.0:
        assert facts["parameters"] == int(once["parameters"]) + output.size
        assert facts["note"] == once["note"] == ""
        return
    assert facts["parameters"] == once["parameters"]
    assert "one tied matrix, from F32" in str(facts["note"])
    weights = load_file(tmp_path / "tied" / "model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"], torch.from_numpy(output))
