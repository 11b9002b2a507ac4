"""Canonical weights checked, fused and packed for the decode engine.

Three rewrites save operations and change only rounding: RMSNorm scales are folded into the matrix
that follows, query, key and value matrices become one, and the two halves that RoPE rotates are
interleaved so that a rotation works on neighbours. With bf16 each matrix is rounded once, to
nearest, and a bf16 matrix is kept. Norms are not folded then, since that would round again.

Shapes: V vocabulary, D model width, H query heads, G key/value heads, d head width, E experts, F
expert width, M draft width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.models.decode.compiled.packed import join_flat, join_packed, pack_matrix
from ostinato.models.decode.config import Precision
from ostinato.models.decode.supported import check_vectors
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import check_shapes

_LAYER_NORMS = "input_layernorm", "post_attention_layernorm"


class DraftArrays(NamedTuple):
    """One multi-token-prediction layer, in the order of the compiled draft's arguments. Norms are
    float32, matrices have the engine's precision.
    """

    hidden_in: np.ndarray  # packed [D, D]: half of in_proj for the hidden state
    embed_in: np.ndarray  # packed [D, D]: half of in_proj for the next token's embedding
    gate_up: np.ndarray  # packed [D, 2M]
    down: np.ndarray  # packed [M, D]
    norm_D: np.ndarray
    norms: np.ndarray  # [3, D] of hidden state, embedding and MLP; empty if folded in


class TrunkArrays(NamedTuple):
    """All weights of the trunk, in the order that the compiled trunk reads them. Norms, biases and
    the router are float32, all other matrices have the engine's precision. The router is small, and
    rounding it would move close choices of experts away from the trainer's float32 router.
    """

    embedding: np.ndarray  # packed [D, V]
    head: np.ndarray  # packed [D, V]; the same array if the embedding is tied
    qkv: np.ndarray  # packed [D, (H + 2G) * d] per layer
    qk_scale: np.ndarray  # [H + G, d] per layer, the attention scale folded into queries
    output: np.ndarray  # packed [H * d, D] per layer
    gate: np.ndarray  # packed [D, E] per layer, E padded
    gate_bias: np.ndarray  # [E] per layer
    up: np.ndarray  # packed [D, 2F] per layer and expert, gate half first
    down: np.ndarray  # packed [F, D] per layer and expert
    final_norm_D: np.ndarray
    qkv_bias: np.ndarray  # [(H + 2G) * d] per layer; one zero if the model has none
    norms: np.ndarray  # [2, D] per layer, before attention and experts; empty if folded in


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """All weights of one version, ready to decode."""

    version: int
    trunk: TrunkArrays
    drafts: tuple[DraftArrays, ...]


def in_precision(name: str, tensor: Tensor, precision: Precision) -> Tensor:
    """The tensor in the number format that an engine of this precision stores: norms, biases and routers are float32 in
    every one.
    """
    is_matrix = tensor.dim() > 1 and not name.endswith(".mlp.gate.weight")
    is_rounded = is_matrix and precision is Precision.BF16
    return tensor.to(torch.bfloat16 if is_rounded else torch.float32)


@dataclass(frozen=True, slots=True)
class _Source:
    """Canonical weights in the stored number formats, each converted when it is packed."""

    weights: Mapping[str, Tensor]
    precision: Precision

    def __getitem__(self, name: str) -> Tensor:
        return in_precision(name, self.weights[name].detach(), self.precision)

    @property
    def folds_norms(self) -> bool:
        return self.precision is Precision.FP32

    def fold_norm(self, matrix: Tensor, norm: str) -> Tensor:
        """A matrix, multiplied by the scale of the norm before it if norms are folded."""
        return matrix * self[norm] if self.folds_norms else matrix

    def norms(self, names: Sequence[str]) -> np.ndarray:
        """Scales of the norms before matrices. Empty if they are folded in."""
        kept = [] if self.folds_norms else [self[name] for name in names]
        return join_flat([torch.zeros(0), *kept])


def prepare_weights(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    version: int,
    precision: Precision = Precision.FP32,
) -> DecodeWeights:
    """Checks, fuses and packs a copy, layer by layer: if `weights` reads from a file, memory holds
    little more than the copy. The input may be changed afterwards.

    Raises ValueError that names the bad tensor before anything is packed.
    """
    check_weights(spec, weights)
    check_vectors(spec)
    source = _Source(weights, precision)
    return DecodeWeights(
        version=version,
        trunk=_pack_trunk(spec, source),
        drafts=tuple(_pack_draft(spec, source, depth) for depth in range(spec.mtp_depth)),
    )


def check_weights(spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
    """Refuses weights with other names or shapes than the spec's, or with non-finite values."""
    check_shapes(spec, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"weight {name} holds a value that is not finite")


def expert_sizes(spec: ModelSpec) -> tuple[int, int, int]:
    """(experts, experts per token, inner width) of the compiled trunk, which computes a dense layer
    as a single expert with share 1.
    """
    if spec.num_moe_layers:
        return spec.num_experts, spec.experts_per_token, spec.expert_hidden_size
    return 1, 1, spec.dense_hidden_size


def _pack_trunk(spec: ModelSpec, source: _Source) -> TrunkArrays:
    embedding = pack_matrix(source["model.embed_tokens.weight"].t())
    layers = [f"model.layers.{layer}" for layer in range(spec.num_layers)]
    parts = len(layers) * expert_sizes(spec)[0]
    return TrunkArrays(
        embedding=embedding,
        head=embedding if spec.tied_embeddings else pack_matrix(source["lm_head.weight"].t()),
        qkv=join_packed(
            (pack_matrix(_fuse_qkv(spec, source, layer).t()) for layer in layers), len(layers)
        ),
        qk_scale=join_flat([_fuse_scales(spec, source, layer) for layer in layers]),
        output=join_packed(
            (pack_matrix(source[f"{layer}.self_attn.o_proj.weight"].t()) for layer in layers),
            len(layers),
        ),
        gate=join_packed(
            (pack_matrix(_gate_ED(spec, source, layer).t()) for layer in layers), len(layers)
        ),
        gate_bias=join_flat([_gate_bias_E(spec, source, layer) for layer in layers]),
        up=join_packed(
            (pack_matrix(up.t()) for layer in layers for up in _up_EFD(spec, source, layer)), parts
        ),
        down=join_packed(
            (pack_matrix(down.t()) for layer in layers for down in _down_EDF(spec, source, layer)),
            parts,
        ),
        final_norm_D=join_flat([source["model.norm.weight"]]),
        qkv_bias=join_flat(
            [_fuse_biases(spec, source, layer) for layer in layers]
            if spec.qkv_bias
            else [torch.zeros(1)]
        ),
        norms=source.norms([f"{layer}.{norm}.weight" for layer in layers for norm in _LAYER_NORMS]),
    )


# Matrices of a layer's experts; a dense layer has a single expert. F counts gate and up rows.
_EXPERT_NORM = "post_attention_layernorm.weight"


def _gate_ED(spec: ModelSpec, source: _Source, layer: str) -> Tensor:
    if not spec.num_moe_layers:
        return torch.zeros(1, spec.hidden_size)
    return source.fold_norm(source[f"{layer}.mlp.gate.weight"], f"{layer}.{_EXPERT_NORM}")


def _gate_bias_E(spec: ModelSpec, source: _Source, layer: str) -> Tensor:
    name = f"{layer}.mlp.gate.e_score_correction_bias"  # a softmax router has none
    return source[name] if name in source.weights else torch.zeros(expert_sizes(spec)[0])


def _up_EFD(spec: ModelSpec, source: _Source, layer: str) -> Tensor:
    norm = f"{layer}.{_EXPERT_NORM}"
    if spec.num_moe_layers:
        return source.fold_norm(source[f"{layer}.mlp.experts.gate_up_proj"], norm)
    return source.fold_norm(source[f"{layer}.mlp.gate_up_proj.weight"], norm)[None]


def _down_EDF(spec: ModelSpec, source: _Source, layer: str) -> Tensor:
    if spec.num_moe_layers:
        return source[f"{layer}.mlp.experts.down_proj"]
    return source[f"{layer}.mlp.down_proj.weight"][None]


def _fuse_qkv(spec: ModelSpec, source: _Source, layer: str) -> Tensor:
    """[(H + 2G) * d, D], query and key rows interleaved for RoPE."""
    query_OD, key_OD, value_OD = (
        source[f"{layer}.self_attn.{part}_proj.weight"] for part in ("q", "k", "v")
    )
    rows = [_interleave(query_OD, spec.head_dim), _interleave(key_OD, spec.head_dim), value_OD]
    return source.fold_norm(torch.cat(rows), f"{layer}.input_layernorm.weight")


def _fuse_biases(spec: ModelSpec, source: _Source, layer: str) -> Tensor:
    """[(H + 2G) * d], in the order of `_fuse_qkv`'s rows."""
    query_O, key_O, value_O = (
        source[f"{layer}.self_attn.{part}_proj.bias"] for part in ("q", "k", "v")
    )
    return torch.cat(
        [_interleave(query_O, spec.head_dim), _interleave(key_O, spec.head_dim), value_O]
    )


def _fuse_scales(spec: ModelSpec, source: _Source, layer: str) -> Tensor:
    """Norm weights of query and key heads [H + G, d], or ones without a norm."""
    query_d = key_d = torch.ones(spec.head_dim)
    if spec.qk_norm:
        query_d = _interleave(source[f"{layer}.self_attn.q_norm.weight"], spec.head_dim)
        key_d = _interleave(source[f"{layer}.self_attn.k_norm.weight"], spec.head_dim)
    query_d = query_d * spec.head_dim**-0.5
    heads = spec.num_attention_heads, spec.num_query_groups
    return torch.cat([query_d.expand(heads[0], -1), key_d.expand(heads[1], -1)])


def _pack_draft(spec: ModelSpec, source: _Source, depth: int) -> DraftArrays:
    prefix = f"model.mtp.{depth}"
    hidden_in_DD, embed_in_DD = source[f"{prefix}.in_proj.weight"].split(spec.hidden_size, dim=1)
    gate_up_MD = source[f"{prefix}.gate_up_proj.weight"]
    norms = [f"{prefix}.{norm}.weight" for norm in ("hidden_norm", "embed_norm", "mlp_norm")]
    return DraftArrays(
        hidden_in=pack_matrix(source.fold_norm(hidden_in_DD, norms[0]).t()),
        embed_in=pack_matrix(source.fold_norm(embed_in_DD, norms[1]).t()),
        gate_up=pack_matrix(source.fold_norm(gate_up_MD, norms[2]).t()),
        down=pack_matrix(source[f"{prefix}.down_proj.weight"].t()),
        norm_D=join_flat([source[f"{prefix}.norm.weight"]]),
        norms=source.norms(norms),
    )


def _interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Puts element i of each head's first half next to element i of its second half."""
    rest = rows.shape[1:]
    return rows.reshape(-1, 2, head_dim // 2, *rest).transpose(1, 2).reshape(rows.shape)
