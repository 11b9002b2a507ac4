"""Families without experts: llama (SmolLM2 and Llama 3 are of it), mistral, qwen2, qwen3."""

from typing import Any

from ostinato.models.families.config_fields import ConfigFields
from ostinato.models.families.family import Family
from ostinato.models.families.shared_fields import read_shared, write_shared
from ostinato.models.spec import ModelSpec


def _read(
    fields: ConfigFields, *, qk_norm: bool, qkv_bias: bool, head_dim: int | None = None
) -> ModelSpec:
    shared = read_shared(fields, head_dim=head_dim)
    return ModelSpec(
        **shared,
        num_dense_layers=shared["num_layers"],
        dense_hidden_size=fields.count("intermediate_size"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def _write(spec: ModelSpec, *, qk_norm: bool, qkv_bias: bool) -> dict[str, Any] | None:
    is_stated = spec.qk_norm == qk_norm and spec.qkv_bias == qkv_bias and not spec.num_moe_layers
    if not is_stated or spec.rotary_fraction < 1:
        return None
    return write_shared(spec) | {"intermediate_size": spec.dense_hidden_size}


def _read_llama(fields: ConfigFields) -> ModelSpec:
    fields.expect("attention_bias", False, False)
    return _read(fields, qk_norm=False, qkv_bias=False)


def _write_llama(spec: ModelSpec) -> dict[str, Any] | None:
    fields = _write(spec, qk_norm=False, qkv_bias=False)
    return None if fields is None else fields | {"attention_bias": False, "mlp_bias": False}


def _read_mistral(fields: ConfigFields) -> ModelSpec:
    """llama's network, which `family_of_spec` writes it as. A file that names no window means one of 4096."""
    if not fields.is_null("sliding_window"):
        window = fields.take("sliding_window", 4096)
        raise ValueError(f"config.json: sliding_window = {window}, wanted null: full attention")
    fields.count("num_key_value_heads")  # where it is absent transformers takes 8, not all heads
    return _read(fields, qk_norm=False, qkv_bias=False)


def _read_qwen2(fields: ConfigFields) -> ModelSpec:
    _expect_full_attention(fields)
    return _read(fields, qk_norm=False, qkv_bias=True)


def _write_qwen2(spec: ModelSpec) -> dict[str, Any] | None:
    fields = _write(spec, qk_norm=False, qkv_bias=True)
    return None if fields is None else fields | {"use_sliding_window": False}


def _read_qwen3(fields: ConfigFields) -> ModelSpec:
    fields.expect("attention_bias", False, False)
    _expect_full_attention(fields)
    return _read(fields, qk_norm=True, qkv_bias=False, head_dim=128)


def _write_qwen3(spec: ModelSpec) -> dict[str, Any] | None:
    fields = _write(spec, qk_norm=True, qkv_bias=False)
    if fields is None:
        return None
    return fields | {"attention_bias": False, "use_sliding_window": False}


def _expect_full_attention(fields: ConfigFields) -> None:
    fields.expect("use_sliding_window", False, False)
    fields.take("sliding_window", None)  # means nothing without the switch
    kinds = fields.take("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"config.json: layer_types = {kinds!r}, wanted full_attention alone")


LLAMA = Family("llama", "LlamaForCausalLM", _read_llama, _write_llama)
MISTRAL = Family("mistral", "MistralForCausalLM", _read_mistral, lambda spec: None)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3)
