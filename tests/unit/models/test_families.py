"""Configurations of published families: what a file leaves out is what transformers would take."""

from typing import Any

import pytest
import transformers

from ostinato.infra.serving.published_models import FAMILIES
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
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "deepseek_v3": EXPERTS | {"num_hidden_layers": 5, "num_key_value_heads": 8, "num_mtp_layers": 0},
    "glm4_moe": EXPERTS | {"n_routed_experts": 8, "num_mtp_layers": 0},
}


@pytest.mark.parametrize("model_type", REQUIRED)
def test_a_field_left_out_means_what_it_means_in_transformers(model_type: str) -> None:
    stated = REQUIRED[model_type]
    whole: dict[str, Any] = transformers.AutoConfig.for_model(model_type, **stated).to_dict()
    whole = {name: value for name, value in whole.items() if not name.startswith("_")}
    family: Family = FAMILIES.load(model_type)
    assert family.spec_of(stated) == family.spec_of(whole)
