"""Families without experts: llama (with SmolLM2 and Llama 3), mistral, phi3, qwen2, qwen3."""

from collections.abc import Callable
from typing import Any

from ostinato.models.families.config_fields import ConfigFields
from ostinato.models.families.family import Family
from ostinato.models.families.shared_fields import read_shared, write_shared
from ostinato.models.spec import ModelSpec


def _read(
    fields: ConfigFields,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    head_dim: int | None = None,
    norm_epsilon: float = 1e-6,
) -> ModelSpec:
    shared = read_shared(fields, head_dim=head_dim, norm_epsilon=norm_epsilon)
    return ModelSpec(
        **shared,
        num_dense_layers=shared["num_layers"],
        dense_hidden_size=fields.count("intermediate_size"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def _writer(
    *, qk_norm: bool = False, qkv_bias: bool = False, **constants: bool
) -> Callable[[ModelSpec], dict[str, Any] | None]:
    """The inverse of `_read`. `constants`: further fields, with the family's only value."""

    def write(spec: ModelSpec) -> dict[str, Any] | None:
        has_parts = spec.qk_norm == qk_norm and spec.qkv_bias == qkv_bias
        if not has_parts or spec.num_moe_layers or spec.rotary_fraction < 1:
            return None
        return write_shared(spec) | {"intermediate_size": spec.dense_hidden_size} | constants

    return write


def _read_llama(fields: ConfigFields) -> ModelSpec:
    fields.expect("attention_bias", False, False)
    return _read(fields)


def _read_mistral(fields: ConfigFields) -> ModelSpec:
    """Reads llama's network; `family_of_spec` writes it as llama. A file without a window means 4096."""
    window = None if fields.is_null("sliding_window") else fields.count("sliding_window", 4096)
    fields.count("num_key_value_heads")  # required: without it transformers uses 8, not all heads
    return _within_window(_read(fields), window)


def _read_phi3(fields: ConfigFields) -> ModelSpec:
    """Reads llama's network from files with fused matrices."""
    fields.expect("attention_bias", False, False)
    fields.take("auto_map", None)  # code that transformers has
    fields.take("original_max_position_embeddings", None)  # for longrope, which `rope` refuses
    for name in ("embd_pdrop", "resid_pdrop"):
        fields.expect(name, 0, 0)
    has_window = fields.take("sliding_window", None) is not None
    window = fields.count("sliding_window") if has_window else None
    return _within_window(_read(fields, norm_epsilon=1e-5), window)


def _within_window(spec: ModelSpec, window_tokens: int | None) -> ModelSpec:
    """The shape with sequences cut to the sliding window, within which attention is full."""
    longest = min(spec.max_sequence_tokens, window_tokens or spec.max_sequence_tokens)
    return spec.model_copy(update={"max_sequence_tokens": longest})


def _fused_phi3(spec: ModelSpec) -> dict[str, tuple[str, slice]]:
    queries = spec.num_attention_heads * spec.head_dim
    keys = queries + spec.num_query_groups * spec.head_dim
    values = 2 * keys - queries
    inner = spec.dense_hidden_size
    rows = {
        "self_attn.q_proj": ("self_attn.qkv_proj", slice(0, queries)),
        "self_attn.k_proj": ("self_attn.qkv_proj", slice(queries, keys)),
        "self_attn.v_proj": ("self_attn.qkv_proj", slice(keys, values)),
        "mlp.gate_proj": ("mlp.gate_up_proj", slice(0, inner)),
        "mlp.up_proj": ("mlp.gate_up_proj", slice(inner, 2 * inner)),
    }
    return {
        f"model.layers.{layer}.{name}.weight": (f"model.layers.{layer}.{fused}.weight", part)
        for layer in range(spec.num_layers)
        for name, (fused, part) in rows.items()
    }


def _read_qwen2(fields: ConfigFields) -> ModelSpec:
    _expect_full_attention(fields)
    return _read(fields, qkv_bias=True)


def _read_qwen3(fields: ConfigFields) -> ModelSpec:
    fields.expect("attention_bias", False, False)
    _expect_full_attention(fields)
    return _read(fields, qk_norm=True, head_dim=128)


def _expect_full_attention(fields: ConfigFields) -> None:
    fields.expect("use_sliding_window", False, False)
    fields.take("sliding_window", None)  # has no effect without use_sliding_window
    kinds = fields.take("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"config.json: layer_types = {kinds!r}, wanted only full_attention")


LLAMA = Family(
    "llama", "LlamaForCausalLM", _read_llama, _writer(attention_bias=False, mlp_bias=False)
)
MISTRAL = Family("mistral", "MistralForCausalLM", _read_mistral, lambda spec: None)
PHI3 = Family("phi3", "Phi3ForCausalLM", _read_phi3, lambda spec: None, fused=_fused_phi3)
QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", _read_qwen2, _writer(qkv_bias=True, use_sliding_window=False)
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _read_qwen3,
    _writer(qk_norm=True, attention_bias=False, use_sliding_window=False),
)
