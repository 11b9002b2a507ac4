"""Canonical weights laid out for decoding.

`DecodeWeights`: fused, copied and checked tensors that one forward pass of the decode engine reads.
It computes no tokens and keeps no cache.

Three rewrites save operations and change only rounding: RMSNorm scales are folded into the matrix
that follows, query, key and value matrices are one, and the two halves that RoPE rotates are
interleaved so that the rotation is one complex product.

Shapes: V vocabulary, D model width, H query heads, G key/value heads, d head width, E experts, F
expert width, M draft width, I = E*D and J = E*F rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ostinato.models.decode.compiled.packed import (
    PackedDraft,
    PackedWeights,
    join_flat,
    join_packed,
    pack_matrix,
)
from ostinato.models.decode.config import Precision
from ostinato.models.spec import ModelSpec

_ALWAYS_FP32 = ("gate_ED", "qk_scale_Hd")
_GROUPED_ALIGNMENT_ELEMENTS = 4  # grouped_mm wants strides of 16 bytes


def dtype_of(precision: Precision) -> torch.dtype:
    """The precision as torch names it."""
    return torch.float32 if precision is Precision.FP32 else torch.bfloat16


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer."""

    qkv_OD: Tensor  # [(H+2G)*d, D], input norm folded in, query and key rows interleaved for RoPE
    qk_scale_Hd: (
        Tensor  # [H+G, d], norm weights of query and key heads; attention scale folded into queries
    )
    output_OD: Tensor  # [H*d, D] view of the transposed matrix
    gate_ED: Tensor  # post-attention norm folded in
    gate_bias_E: Tensor
    expert_up_EDF: Tensor  # [E, D, 2F] view, gate half first, post-attention norm folded in
    expert_down_EFD: Tensor  # [E, F, D] view


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """One multi-token-prediction layer."""

    hidden_in_DD: Tensor  # half of in_proj for the hidden state, its norm folded in
    embed_in_DD: Tensor  # half of in_proj for the next token's embedding, its norm folded in
    gate_up_MD: Tensor  # [2M, D], norm folded in
    down_MD: Tensor  # [M, D] view of the transposed matrix
    norm_D: Tensor


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Experts of one layer once more: a row is what one input element adds to all outputs."""

    up_IF: Tensor  # [E*D, 2F]
    down_JD: Tensor  # [E*F, D]


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """Everything one version of the model needs to decode."""

    version: int
    embedding_VD: Tensor
    final_norm_D: Tensor
    layers: tuple[LayerWeights, ...]
    drafts: tuple[DraftWeights, ...]
    packed: PackedWeights | None = None  # the same once more, for native decoding
    expert_rows: tuple[ExpertRows, ...] | None = None  # a layer each, for eager float32 on the CPU


def prepare_weights(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    version: int,
    precision: Precision = Precision.FP32,
    *,
    native: bool = False,
) -> DecodeWeights:
    """Checks names, shapes and finiteness, then copies and fuses. The input may be changed
    afterwards. `native` also packs them for compiled loops.

    Raises ValueError that names the tensor, so that nothing half-applied is ever served.
    """
    _check(spec, weights, version)
    source = {name: weights[name].detach().to(torch.float32) for name in spec.weight_shapes()}
    layers = tuple(_fuse_layer(spec, source, layer) for layer in range(spec.num_layers))
    drafts = tuple(_fuse_draft(spec, source, depth) for depth in range(spec.mtp_depth))
    prepared = DecodeWeights(
        version=version,
        embedding_VD=source["model.embed_tokens.weight"].clone(),
        final_norm_D=source["model.norm.weight"].clone(),
        layers=tuple(_stored(layer, precision) for layer in layers),
        drafts=tuple(_stored(draft, precision) for draft in drafts),
    )
    prepared = replace(prepared, embedding_VD=prepared.embedding_VD.to(dtype_of(precision)))
    if native:
        return replace(prepared, packed=_pack(prepared))
    if precision is not Precision.FP32:
        return prepared
    return replace(prepared, expert_rows=tuple(_as_rows(layer) for layer in layers))


def _stored(part: Any, precision: Precision) -> Any:
    """The part with its matrices in `precision`. Norms, and what chooses experts, stay float32: a
    rounded router would choose others than the trainer's.
    """
    if precision is Precision.FP32:
        return part
    matrices = {
        field.name: getattr(part, field.name).to(dtype_of(precision))
        for field in fields(part)
        if getattr(part, field.name).dim() > 1 and field.name not in _ALWAYS_FP32
    }
    return replace(part, **matrices)


def _as_rows(layer: LayerWeights) -> ExpertRows:
    return ExpertRows(
        up_IF=layer.expert_up_EDF.contiguous().flatten(0, 1),
        down_JD=layer.expert_down_EFD.contiguous().flatten(0, 1),
    )


def _pack(weights: DecodeWeights) -> PackedWeights:
    layers = weights.layers
    return PackedWeights(
        embedding_VD=join_flat([weights.embedding_VD]),
        head=pack_matrix(weights.embedding_VD.t()),
        qkv=join_packed(pack_matrix(layer.qkv_OD.t()) for layer in layers),
        qk_scale=join_flat([layer.qk_scale_Hd for layer in layers]),
        output=join_packed(pack_matrix(layer.output_OD) for layer in layers),
        gate=join_packed(pack_matrix(layer.gate_ED.t()) for layer in layers),
        gate_bias=join_flat([layer.gate_bias_E for layer in layers]),
        up=join_packed(pack_matrix(up) for layer in layers for up in layer.expert_up_EDF),
        down=join_packed(pack_matrix(down) for layer in layers for down in layer.expert_down_EFD),
        final_norm_D=join_flat([weights.final_norm_D]),
        drafts=tuple(
            PackedDraft(
                hidden_in=pack_matrix(draft.hidden_in_DD.t()),
                embed_in=pack_matrix(draft.embed_in_DD.t()),
                gate_up=pack_matrix(draft.gate_up_MD.t()),
                down=pack_matrix(draft.down_MD),
                norm_D=join_flat([draft.norm_D]),
            )
            for draft in weights.drafts
        ),
    )


def _check(spec: ModelSpec, weights: Mapping[str, Tensor], version: int) -> None:
    wanted = spec.weight_shapes()
    missing = sorted(wanted.keys() - weights.keys())
    unknown = sorted(weights.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"weights version {version}: missing {missing[:3]} ({len(missing)}), "
            f"unknown {unknown[:3]} ({len(unknown)}), "
            f"wanted exactly the {len(wanted)} names of the spec"
        )
    for name, shape in wanted.items():
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"weights version {version}: {name} has shape {tuple(tensor.shape)}, wanted {shape}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"weights version {version}: {name} holds a value that is not finite")
    for field in ("hidden_size", "expert_hidden_size"):
        if getattr(spec, field) % _GROUPED_ALIGNMENT_ELEMENTS:
            raise ValueError(
                f"{field}={getattr(spec, field)}, wanted a multiple of "
                f"{_GROUPED_ALIGNMENT_ELEMENTS}: the grouped matrix product needs aligned rows"
            )


def _fuse_layer(spec: ModelSpec, source: Mapping[str, Tensor], layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    input_norm_D = source[f"{prefix}.input_layernorm.weight"]
    middle_norm_D = source[f"{prefix}.post_attention_layernorm.weight"]
    query_OD = _interleave(source[f"{prefix}.self_attn.q_proj.weight"], spec.head_dim)
    key_OD = _interleave(source[f"{prefix}.self_attn.k_proj.weight"], spec.head_dim)
    value_OD = source[f"{prefix}.self_attn.v_proj.weight"]
    query_scale_d = _interleave(source[f"{prefix}.self_attn.q_norm.weight"], spec.head_dim)
    key_scale_d = _interleave(source[f"{prefix}.self_attn.k_norm.weight"], spec.head_dim)
    query_scale_d = query_scale_d * spec.head_dim**-0.5
    up_EFD = source[f"{prefix}.mlp.experts.gate_up_proj"] * middle_norm_D
    return LayerWeights(
        qkv_OD=torch.cat([query_OD, key_OD, value_OD]) * input_norm_D,
        qk_scale_Hd=torch.cat(
            [
                query_scale_d.expand(spec.num_attention_heads, -1),
                key_scale_d.expand(spec.num_query_groups, -1),
            ]
        ),
        output_OD=source[f"{prefix}.self_attn.o_proj.weight"].clone().t(),
        gate_ED=source[f"{prefix}.mlp.gate.weight"] * middle_norm_D,
        gate_bias_E=source[f"{prefix}.mlp.gate.e_score_correction_bias"].clone(),
        expert_up_EDF=up_EFD.transpose(1, 2),
        expert_down_EFD=source[f"{prefix}.mlp.experts.down_proj"].clone().transpose(1, 2),
    )


def _fuse_draft(spec: ModelSpec, source: Mapping[str, Tensor], depth: int) -> DraftWeights:
    prefix = f"model.mtp.{depth}"
    hidden_in_DD, embed_in_DD = source[f"{prefix}.in_proj.weight"].split(spec.hidden_size, dim=1)
    return DraftWeights(
        hidden_in_DD=hidden_in_DD * source[f"{prefix}.hidden_norm.weight"],
        embed_in_DD=embed_in_DD * source[f"{prefix}.embed_norm.weight"],
        gate_up_MD=source[f"{prefix}.gate_up_proj.weight"] * source[f"{prefix}.mlp_norm.weight"],
        down_MD=source[f"{prefix}.down_proj.weight"].clone().t(),
        norm_D=source[f"{prefix}.norm.weight"].clone(),
    )


def _interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Puts element i of each head's first half next to element i of its second half."""
    rest = rows.shape[1:]
    return (
        rows.reshape(-1, 2, head_dim // 2, *rest).transpose(1, 2).reshape(rows.shape).contiguous()
    )
