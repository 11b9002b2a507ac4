"""Live tensors of a Megatron model by canonical name, and the fused query, key and value rows."""

from typing import Any

import torch
from torch import Tensor

from ostinato.models.spec import ModelSpec


def layer_tensors(layer: Any, prefix: str, spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors of one layer, with query, key and value as one `qkv_proj`."""
    named: dict[str, Tensor] = {f"{prefix}.input_layernorm.weight": layer.input_layernorm.weight}
    attention_tensors = _grouped_tensors if spec.latent is None else _latent_tensors
    named |= attention_tensors(layer.self_attention, f"{prefix}.self_attn", spec)
    named[f"{prefix}.post_attention_layernorm.weight"] = layer.pre_mlp_layernorm.weight
    if layer.layer_number <= spec.num_dense_layers:  # Megatron counts from 1
        return named | _dense_tensors(layer.mlp, f"{prefix}.mlp")
    return named | _moe_tensors(layer.mlp, f"{prefix}.mlp", spec)


def _grouped_tensors(attention: Any, prefix: str, spec: ModelSpec) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {f"{prefix}.qkv_proj.weight": attention.linear_qkv.weight}
    if spec.qkv_bias:
        named[f"{prefix}.qkv_proj.bias"] = attention.linear_qkv.bias
    named[f"{prefix}.o_proj.weight"] = attention.linear_proj.weight
    if spec.qk_norm:
        named[f"{prefix}.q_norm.weight"] = attention.q_layernorm.weight
        named[f"{prefix}.k_norm.weight"] = attention.k_layernorm.weight
    return named


def _latent_tensors(attention: Any, prefix: str, spec: ModelSpec) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {f"{prefix}.q_proj.weight": attention.q_up.weight}
    if attention.q_down is not None:
        named = {
            f"{prefix}.q_a_proj.weight": attention.q_down.weight,
            f"{prefix}.q_a_layernorm.weight": attention.q_norm.weight,
            f"{prefix}.q_b_proj.weight": attention.q_up.weight,
        }
    return named | {
        f"{prefix}.kv_a_proj_with_mqa.weight": attention.kv_down.weight,
        f"{prefix}.kv_a_layernorm.weight": attention.kv_norm.weight,
        f"{prefix}.kv_b_proj.weight": attention.kv_up.weight,
        f"{prefix}.o_proj.weight": attention.linear_proj.weight,
    }


def _moe_tensors(moe: Any, prefix: str, spec: ModelSpec) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {f"{prefix}.gate.weight": moe.router.weight}
    if spec.router_score == "sigmoid":
        named[f"{prefix}.gate.e_score_correction_bias"] = moe.router.expert_bias
    named[f"{prefix}.experts.gate_up_proj"] = moe.experts.gate_up_EGD
    named[f"{prefix}.experts.down_proj"] = moe.experts.down_EDF
    if spec.shared_expert_hidden_size:
        named |= _dense_tensors(moe.shared_experts, f"{prefix}.shared_experts")
    return named


def _dense_tensors(mlp: Any, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.gate_up_proj.weight": mlp.linear_fc1.weight,
        f"{prefix}.down_proj.weight": mlp.linear_fc2.weight,
    }


def head_rows(name: str, spec: ModelSpec) -> tuple[int, ...]:
    """Row counts, in order, of the projections that make up one head in the named matrix. Every
    head repeats them. Empty for a matrix without heads.
    """
    if name.endswith((".qkv_proj.weight", ".q_b_proj.weight", ".self_attn.q_proj.weight")):
        return (spec.head_dim,)  # keys and values between queries have as many
    if name.endswith(".kv_b_proj.weight"):
        assert spec.latent is not None
        return (spec.head_dim - spec.latent.rotary_head_dim, spec.latent.value_head_dim)
    return ()


def split_qkv(tensor: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Splits Megatron's interleaved rows (a group's queries, its key, its value) into q, k, v."""
    queries = spec.num_attention_heads // spec.num_query_groups
    rest = tensor.shape[1:]
    grouped = tensor.view(spec.num_query_groups, queries + 2, spec.head_dim, *rest)
    query, key, value = grouped[:, :queries], grouped[:, queries], grouped[:, queries + 1]
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def join_qkv(parts: tuple[Tensor, Tensor, Tensor], spec: ModelSpec) -> Tensor:
    """The inverse of `split_qkv`."""
    rest = parts[0].shape[1:]
    shape = (spec.num_query_groups, -1, spec.head_dim, *rest)
    grouped = [part.reshape(shape) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)
