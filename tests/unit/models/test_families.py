"""Configurations of published families: what a file leaves out is what transformers would take."""

from typing import Any

import pytest
import transformers

from ostinato.infra.serving.published_models import FAMILIES, family_of_spec
from ostinato.models.families.family import Family

DENSE = {
    "vocab_size": 131,
    "hidden_size": 256,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = DENSE | {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
REQUIRED = {
    "llama": DENSE,
    "mistral": DENSE | {"sliding_window": None},
    "phi3": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "deepseek_v3": EXPERTS
    | {"num_hidden_layers": 5, "num_key_value_heads": 8, "num_mtp_layers": 0},
    "glm4_moe": EXPERTS | {"n_routed_experts": 8, "num_mtp_layers": 0},
}


@pytest.mark.parametrize("model_type", REQUIRED)
def test_a_field_left_out_means_what_it_means_in_transformers(model_type: str) -> None:
    stated = REQUIRED[model_type]
    whole: dict[str, Any] = transformers.AutoConfig.for_model(model_type, **stated).to_dict()
    whole = {name: value for name, value in whole.items() if not name.startswith("_")}
    family: Family = FAMILIES.load(model_type)
    assert family.spec_of(stated) == family.spec_of(whole)


@pytest.mark.parametrize(
    ("model_type", "window", "longest"),
    [
        ("mistral", {"sliding_window": None}, 64),
        ("mistral", {"sliding_window": 40}, 40),
        ("mistral", {"sliding_window": 4096}, 64),
        ("phi3", {}, 64),
        ("phi3", {"sliding_window": None}, 64),
        ("phi3", {"sliding_window": 40}, 40),
    ],
)
def test_sequences_are_no_longer_than_the_window(
    model_type: str, window: dict[str, int | None], longest: int
) -> None:
    spec = FAMILIES.load(model_type).spec_of(DENSE | window)
    assert spec.max_sequence_tokens == longest
    assert family_of_spec(spec).model_type == "llama"


def test_a_mistral_file_without_a_window_means_one_of_4096() -> None:
    spec = FAMILIES.load("mistral").spec_of(DENSE | {"max_position_embeddings": 32_768})
    assert spec.max_sequence_tokens == 4096


def test_windows_are_numbers() -> None:
    for model_type in ("mistral", "phi3"):
        with pytest.raises(ValueError, match="sliding_window = 0, wanted a positive whole number"):
            FAMILIES.load(model_type).spec_of(DENSE | {"sliding_window": 0})


def test_kimi_k2_is_read_as_the_network_that_it_copies() -> None:
    config = REQUIRED["deepseek_v3"] | {"auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001}
    spec = FAMILIES.load("kimi_k2").spec_of(config | {"scoring_func": "sigmoid"})
    assert spec == FAMILIES.load("deepseek_v3").spec_of(config)
    assert family_of_spec(spec).model_type == "deepseek_v3"
    with pytest.raises(ValueError, match="topk_method = 'greedy', only 'noaux_tc' is supported"):
        FAMILIES.load("kimi_k2").spec_of(config | {"topk_method": "greedy"})
    with pytest.raises(ValueError, match="rope_type = 'linear', wanted one of default, yarn"):
        FAMILIES.load("kimi_k2").spec_of(config | {"rope_scaling": {"type": "linear", "factor": 2}})
