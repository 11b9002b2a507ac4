"""Configurations of published families: what a file leaves out is what transformers would take."""

from typing import Any

import pytest
import transformers

from ostinato.infra.serving.published_models import FAMILIES
from ostinato.models.families.family import Family

REQUIRED = {
    "vocab_size": 131,
    "hidden_size": 256,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("model_type", FAMILIES.names)
def test_a_field_left_out_means_what_it_means_in_transformers(model_type: str) -> None:
    whole: dict[str, Any] = transformers.AutoConfig.for_model(model_type, **REQUIRED).to_dict()
    family: Family = FAMILIES.load(model_type)
    known = {name: value for name, value in REQUIRED.items() if name in whole}
    if model_type in ("llama", "qwen2"):
        known = {name: value for name, value in known.items() if "expert" not in name}
    assert family.spec_of(known) == family.spec_of(whole)
