"""Published models compute in our trainer what they compute in transformers, and come out again unchanged.

Tiny random models of every family, with sizes that do not divide: 9 query heads over 3 key heads,
head width unlike hidden/heads, dense layers first, groups of experts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato.infra.serving.published_models import FAMILIES, write_model_directory
from ostinato.models.checkpoint.streaming import TensorFiles
from ostinato.models.families.family import Family
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig
from tests.fakes.logits import forward_logits

SIZES = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA_3 = {
    "rope_theta": 500.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"hidden_size": 40, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
GROUPS = {  # of experts, with a shared one and a first layer without
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "rope_theta": 100_000.0}),
    "llama-3": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA_3}),
    "mistral": ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
    "mistral-window": ("mistral", {"sliding_window": 40, "rope_theta": 1e6}),
    "phi3": ("phi3", {"sliding_window": None, "pad_token_id": 0, "head_dim": 4}),
    "phi3-window": ("phi3", {"sliding_window": 40, "pad_token_id": 0, "head_dim": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "head_dim": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS | {"num_experts": 7, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_moe-shares": ("qwen3_moe", EXPERTS | {"num_experts": 7, "norm_topk_prob": False}),
    "glm4_moe": (
        "glm4_moe",
        EXPERTS | GROUPS | {"use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0},
    ),
}
LATENT = (
    EXPERTS
    | GROUPS
    | {
        "num_key_value_heads": 9,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "head_dim": 6,
        "num_nextn_predict_layers": 0,
    }
)
YARN = {
    "rope_theta": 500.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
CASES |= {
    "deepseek_v3": ("deepseek_v3", LATENT | {"rope_parameters": YARN}),
    "deepseek_v3-whole-queries": (
        "deepseek_v3",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3-one-mscale": (
        "deepseek_v3",
        LATENT | {"rope_parameters": {k: v for k, v in YARN.items() if k != "mscale_all_dim"}},
    ),
}
TOKENS_BT = torch.randint(0, 131, (2, 33), generator=torch.Generator().manual_seed(5))


def publish(
    name: str, directory: Path, dtype: torch.dtype = torch.float32, spread: float = 4.0
) -> Any:
    """A random model of transformers, saved; norms and biases are off their initial values.
    `spread`: factor of the matrices, for logits far from uniform.
    """
    model_type, fields = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | fields))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in key or "bias" in key:
                tensor.add_(0.2 * torch.randn(tensor.shape))
            elif "inv_freq" not in key:
                tensor.mul_(spread)
    model.to(dtype).eval().save_pretrained(directory)
    return model


def read(directory: Path) -> tuple[Family, TrainerModel]:
    """The family, and the model in our trainer."""
    config = json.loads((directory / "config.json").read_text())
    family: Family = FAMILIES.load(config["model_type"])
    spec = family.spec_of(config)
    files = TensorFiles.of(sorted(directory.glob("*.safetensors")))
    model = build_trainer_model(spec, seed=2).eval()
    model.import_weights(dict(family.read_weights(spec, files.fetch)))
    return family, model


def assert_equal_logits(ours: TrainerModel, theirs: Any, tolerance: float) -> None:
    """Teacher-forced logits within `tolerance`; the same choice wherever it is clear."""
    with torch.no_grad():
        seen = forward_logits(ours, TOKENS_BT)
        wanted = theirs(input_ids=TOKENS_BT, use_cache=False).logits.float()
    torch.testing.assert_close(seen, wanted, atol=tolerance, rtol=0)
    best = wanted.topk(2, dim=-1).values
    is_clear = best[..., 0] - best[..., 1] > max(1e-3, 2 * tolerance)
    assert is_clear.any()
    assert torch.equal(seen.argmax(-1)[is_clear], wanted.argmax(-1)[is_clear])


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = publish(name, tmp_path)
    _, ours = read(tmp_path)
    assert_equal_logits(ours, theirs, 1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)  # with 4 no latent attention
def test_export_after_a_step_computes_what_the_trainer_computes(name: str, tmp_path: Path) -> None:
    publish(name, tmp_path / "in")
    _, ours = read(tmp_path / "in")
    optimizer = build_optimizer(ours, OptimizerConfig(kind="adamw"), adam=1e-2)
    (-ours.token_logprobs(TOKENS_BT).mean()).backward()
    before = ours.export_weights()
    optimizer.step()
    weights = ours.export_weights()
    assert not torch.equal(before["model.norm.weight"], weights["model.norm.weight"])
    write_model_directory(tmp_path / "out", ours.spec, weights.__getitem__, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    assert_equal_logits(ours, theirs, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(11)  # both dtypes, most families; 14 would choose one dtype alone
def test_import_and_export_change_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    publish(name, tmp_path / "in", dtype)
    family, ours = read(tmp_path / "in")
    files = TensorFiles.of(sorted((tmp_path / "in").glob("*.safetensors")))
    weights = dict(family.read_weights(ours.spec, files.fetch))
    written = write_model_directory(tmp_path / "out", ours.spec, weights.__getitem__, dtype)
    kind = name.partition("-")[0]
    assert written.model_type == {"mistral": "llama", "phi3": "llama"}.get(
        kind, kind
    )  # its network
    again = TensorFiles.of([tmp_path / "out" / "model.safetensors"])
    fused = family.fused(ours.spec)
    wanted = {key: files.fetch(key) for key in files.headers}
    wanted |= {key: wanted[whole][rows] for key, (whole, rows) in fused.items()}
    assert again.headers.keys() == wanted.keys() - {whole for whole, _ in fused.values()}
    for key in again.headers:
        if not key.endswith("e_score_correction_bias"):  # always written in fp32
            assert again.fetch(key).dtype == wanted[key].dtype
        assert torch.equal(again.fetch(key), wanted[key].to(again.fetch(key).dtype)), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.spec_of(config) == ours.spec


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_logits_of_bf16_weights_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = publish(name, tmp_path, torch.bfloat16, spread=1.0)
    _, ours = read(tmp_path)
    assert_equal_logits(ours, theirs, 2e-2)


def test_config_field_that_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    publish("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    family: Family = FAMILIES.load("llama")
    for field, value in (("attention_sinks", 4), ("mlp_bias", True), ("hidden_act", "gelu")):
        with pytest.raises(ValueError, match=rf"{field} = {value!r}"):
            family.spec_of(config | {field: value})
    with pytest.raises(ValueError, match="rope_type = 'yarn'"):
        family.spec_of(config | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})
