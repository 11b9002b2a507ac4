"""Fields of `config.json` that all supported families share."""

from typing import Any

from ostinato.models.families.config_fields import ConfigFields
from ostinato.models.spec import ModelSpec


def read_shared(
    fields: ConfigFields,
    *,
    rotary_fraction: float | None = None,
    head_dim: int | None = None,
    norm_epsilon: float = 1e-6,
) -> dict[str, Any]:
    """The fields of `ModelSpec` that all families share.

    The arguments are the family's defaults. Without `rotary_fraction`, whole heads are rotated.
    """
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    max_tokens = fields.count("max_position_embeddings")
    rope = fields.rope(max_tokens, 1.0 if rotary_fraction is None else rotary_fraction)
    if rotary_fraction is None and rope["rotary_fraction"] != 1:
        raise ValueError(
            f"config.json: partial_rotary_factor = {rope['rotary_fraction']}, only 1 is supported "
            "in this family"
        )
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden,
        "num_layers": fields.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_query_groups": fields.count("num_key_value_heads", heads),
        "head_dim": fields.count("head_dim", head_dim or hidden // heads),
        "max_sequence_tokens": max_tokens,
        "norm_epsilon": fields.take("rms_norm_eps", norm_epsilon),
        "tied_embeddings": fields.take("tie_word_embeddings", False),
        **rope,
    }


def write_shared(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of `read_shared`."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling_factor > 1:
        rope = {"rope_type": "linear", "factor": spec.rope_scaling_factor}
    elif spec.rope_bands is not None:
        rope = {
            "rope_type": "llama3",
            "factor": spec.rope_bands.factor,
            "low_freq_factor": spec.rope_bands.low_frequency_factor,
            "high_freq_factor": spec.rope_bands.high_frequency_factor,
            "original_max_position_embeddings": spec.rope_bands.original_tokens,
        }
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_query_groups,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_sequence_tokens,
        "rms_norm_eps": spec.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        **write_rope(spec, rope),
    }


def write_rope(spec: ModelSpec, rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE fields for newer and older readers."""
    fields = {
        "rope_theta": spec.rope_base,
        "rope_parameters": rope | {"rope_theta": spec.rope_base},
    }
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = rope
    return fields
