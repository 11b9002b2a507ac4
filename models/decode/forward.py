"""The trunk's forward pass over the slot cache, in eager torch.

Owns `forward_trunk`: embedding, attention against cached keys and values, mixture of experts.
Products are in the precision of the weights, all else in float32. Enters: prepared weights, a
`BatchPlan`, the cache (written in place). Leaves: hidden states after
the final norm and the experts chosen a row. It samples nothing. The formulae are those of the
trainer's model; only the order of roundings differs.

Shapes: N rows, B decoding slots, m rows a decoding slot, A attended slots, T keys, L layers, D
model width, H query heads, G key/value heads, R query heads a group, d head width, E experts, K
experts a token, n rows of one prefill span.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.decode.batch import MASKED, BatchPlan, DecodePlan, PrefillSpan
from models.decode.cache import SlotCache
from models.decode.weights import DecodeWeights, LayerWeights
from models.spec import ModelSpec

_Memory = tuple[Tensor, Tensor]  # keys and values of one layer


class Trunk:
    """Constants of a shape and the forward pass that uses them."""

    def __init__(self, spec: ModelSpec, positions: int, device: str = "cpu") -> None:
        self._spec = spec
        self._groups = spec.num_query_groups
        self._queries_per_group = spec.num_attention_heads // spec.num_query_groups
        self._epsilon = torch.tensor(spec.norm_epsilon, device=device)
        self.rotation_C1d = rotation_table(spec, positions).to(device)

    def normalize(self, hidden: Tensor) -> Tensor:
        """RMSNorm without its scale, over the last axis."""
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._epsilon, norm, norm, value=1 / hidden.shape[-1])
        return hidden * mean_square.rsqrt_()

    def forward(
        self, weights: DecodeWeights, plan: BatchPlan, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """Returns hidden states [N, D] after the final norm and routes [N, L, K]."""
        hidden_ND = weights.embedding_VD.index_select(0, plan.tokens_N).float()
        rotation_N1d = self.rotation_C1d.index_select(0, plan.positions_N)
        masks = [_span_mask(span) for span in plan.spans]
        memory = _attended_memory(cache, plan.decode)
        routes = []
        for index, layer in enumerate(weights.layers):
            attended_NO = self._attend(
                layer, index, hidden_ND, rotation_N1d, plan, masks, memory, cache
            )
            hidden_ND = add_product(hidden_ND, attended_NO, layer.output_OD)
            normal_ND = self.normalize(hidden_ND)
            experts_NK, shares_NK = self.route(layer, normal_ND)
            routes.append(experts_NK)
            add_experts(layer, normal_ND, experts_NK, shares_NK, hidden_ND)
        return self.normalize(hidden_ND).mul_(weights.final_norm_D), torch.stack(routes, dim=1)

    def _attend(
        self,
        layer: LayerWeights,
        index: int,
        hidden_ND: Tensor,
        rotation_N1d: Tensor,
        plan: BatchPlan,
        masks: list[Tensor],
        memory: list[_Memory],
        cache: SlotCache,
    ) -> Tensor:
        heads, groups, width = self._spec.num_attention_heads, self._groups, self._spec.head_dim
        rows = hidden_ND.shape[0]
        qk_NHd, values_NGd = self.project_heads(layer, hidden_ND, rotation_N1d)
        cache.write_layer(index, plan.write_indices, qk_NHd[:, heads:], values_NGd)
        query_NGRd = qk_NHd[:, :heads].view(rows, groups, self._queries_per_group, width)
        if plan.decode is not None and not plan.spans:
            return _attend_decode(query_NGRd, memory[index], plan.decode)
        parts = []
        if plan.decode is not None:
            first = plan.decode.slots * plan.decode.width
            parts.append(_attend_decode(query_NGRd[:first], memory[index], plan.decode))
        for span, mask in zip(plan.spans, masks, strict=True):
            own_memory = (cache.keys_LSGdC[index, span.slot], cache.values_LSGCd[index, span.slot])
            parts.append(_attend_span(query_NGRd, own_memory, span, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def project_heads(
        self, layer: LayerWeights, hidden_ND: Tensor, rotation_N1d: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [N, H+G, d], normalised and rotated, and values [N, G, d]."""
        heads, groups, width = self._spec.num_attention_heads, self._groups, self._spec.head_dim
        rows = hidden_ND.shape[0]
        qkv_NHd = linear(self.normalize(hidden_ND), layer.qkv_OD).view(
            rows, heads + 2 * groups, width
        )
        qk_NHd, values_NGd = qkv_NHd.split([heads + groups, groups], dim=1)
        qk_NHd = self.normalize(qk_NHd).mul_(layer.qk_scale_Hd)
        paired = torch.view_as_complex(qk_NHd.view(rows, heads + groups, width // 2, 2))
        qk_NHd = torch.view_as_real(paired.mul_(rotation_N1d)).view(rows, heads + groups, width)
        return qk_NHd, values_NGd

    def route(self, layer: LayerWeights, normal_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each row and their shares, both [N, K]."""
        scores_NE = F.linear(normal_ND, layer.gate_ED).sigmoid_()
        experts_NK = torch.topk(
            scores_NE + layer.gate_bias_E, self._spec.experts_per_token, dim=-1
        )[1]
        chosen_NK = scores_NE.gather(1, experts_NK)
        return experts_NK, chosen_NK.div_(chosen_NK.sum(-1, keepdim=True))


def linear(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows times a matrix [out, in] in the matrix's precision; float32 comes out."""
    if matrix.dtype is torch.float32:
        return F.linear(rows, matrix)
    return F.linear(rows.to(matrix.dtype), matrix).float()


def add_product(base: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    """Base plus rows times a matrix [in, out]; only the product is in the matrix's precision."""
    if matrix.dtype is torch.float32:
        return torch.addmm(base, rows, matrix)
    return base + torch.mm(rows.to(matrix.dtype), matrix).float()


def rotation_table(spec: ModelSpec, positions: int) -> Tensor:
    """RoPE as complex numbers [C, 1, d/2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    frequencies = spec.rope_base**-exponents
    scaled = torch.arange(positions, dtype=torch.float64) / spec.rope_scaling_factor
    angles = torch.outer(scaled, frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]


def add_experts(
    layer: LayerWeights, normal_ND: Tensor, experts_NK: Tensor, shares_NK: Tensor, hidden_ND: Tensor
) -> None:
    """Adds the weighted outputs of the chosen experts to `hidden_ND` in place."""
    if layer.expert_up_EDF.dtype is not torch.float32:
        _add_rounded_experts(layer, normal_ND, experts_NK, shares_NK, hidden_ND)
        return
    if normal_ND.shape[0] == 1:  # small products beat sorting and grouping (25 us against 50 us)
        for expert, share in zip(experts_NK[0].tolist(), shares_NK[0].tolist(), strict=True):
            gate, up = torch.mm(normal_ND, layer.expert_up_EDF[expert]).chunk(2, dim=-1)
            hidden_ND.addmm_(F.silu(gate).mul_(up), layer.expert_down_EFD[expert], alpha=share)
        return
    num_experts, per_token = layer.gate_ED.shape[0], experts_NK.shape[1]
    flat = experts_NK.view(-1).numpy()
    order = flat.argsort(kind="stable")
    rows = torch.from_numpy(order // per_token)
    ends = np.bincount(flat, minlength=num_experts).cumsum(dtype=np.int32)
    offsets_E = torch.from_numpy(ends)
    inner = F.grouped_mm(normal_ND.index_select(0, rows), layer.expert_up_EDF, offs=offsets_E)
    gate, up = inner.chunk(2, dim=-1)
    outer = F.grouped_mm(F.silu(gate).mul_(up), layer.expert_down_EFD, offs=offsets_E)
    outer.mul_(shares_NK.view(-1, 1).index_select(0, torch.from_numpy(order)))
    hidden_ND.index_add_(0, rows, outer)


def _add_rounded_experts(
    layer: LayerWeights, normal_ND: Tensor, experts_NK: Tensor, shares_NK: Tensor, hidden_ND: Tensor
) -> None:
    """The same with products in the experts' precision, one expert after another."""
    dtype = layer.expert_up_EDF.dtype
    rounded_ND = normal_ND.to(dtype)
    for expert in experts_NK.unique().tolist():
        rows, ranks = (experts_NK == expert).nonzero(as_tuple=True)
        inner = torch.mm(rounded_ND.index_select(0, rows), layer.expert_up_EDF[expert]).float()
        gate, up = inner.chunk(2, dim=-1)
        outer = torch.mm(F.silu(gate).mul_(up).to(dtype), layer.expert_down_EFD[expert]).float()
        hidden_ND.index_add_(0, rows, outer.mul_(shares_NK[rows, ranks][:, None]))


def _attended_memory(cache: SlotCache, plan: DecodePlan | None) -> list[_Memory]:
    """Keys and values of the decoding slots a layer: views of a range, or all slots to gather."""
    if plan is None:
        return []
    keys_LSGdT = cache.keys_LSGdC[..., : plan.context]
    values_LSGTd = cache.values_LSGCd[:, :, :, : plan.context]
    if plan.gather_A is None:
        place = slice(plan.first_slot, plan.first_slot + plan.attended)
        keys_LSGdT = keys_LSGdT[:, place].flatten(1, 2)
        values_LSGTd = values_LSGTd[:, place].flatten(1, 2)
    return list(zip(keys_LSGdT.unbind(0), values_LSGTd.unbind(0), strict=True))


def _attend_decode(query_NGRd: Tensor, memory: _Memory, plan: DecodePlan) -> Tensor:
    """Attention of all decode rows at once; returns [B*m, H*d]."""
    _, groups, per_group, width = query_NGRd.shape
    count, rows, attended = plan.slots, plan.width, plan.attended
    query, (keys, values) = query_NGRd, memory
    if rows > 1:
        query = query.reshape(count, rows, groups, per_group, width).permute(0, 2, 3, 1, 4)
    if plan.gather_A is not None:
        keys = keys.index_select(0, plan.gather_A).flatten(0, 1)
        values = values.index_select(0, plan.gather_A).flatten(0, 1)
    if keys.dtype is not query.dtype:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    if plan.row_of_slot_B is not None:
        spread = query.new_zeros(attended, *query.shape[1:])
        query = spread.index_copy_(0, plan.row_of_slot_B, query)
    scores = torch.bmm(query.reshape(attended * groups, per_group * rows, width), keys)
    if plan.mask_A1mT is not None:
        scores.view(attended, groups * per_group, rows, plan.context).add_(plan.mask_A1mT)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
    mixed = mixed.view(attended, groups, per_group, rows, width)
    if plan.row_of_slot_B is not None:
        mixed = mixed.index_select(0, plan.row_of_slot_B)
    if rows > 1:
        mixed = mixed.permute(0, 3, 1, 2, 4)
    return mixed.reshape(count * rows, groups * per_group * width)


def _attend_span(query_NGRd: Tensor, memory: _Memory, span: PrefillSpan, mask_nT: Tensor) -> Tensor:
    """Attention of one prefill span against its own slot; returns [n, H*d]."""
    _, groups, per_group, width = query_NGRd.shape
    rows = span.end - span.start
    keys_GdT, values_GTd = memory[0][..., : span.end], memory[1][:, : span.end]
    if keys_GdT.dtype is not query_NGRd.dtype:
        keys_GdT, values_GTd = keys_GdT.to(query_NGRd.dtype), values_GTd.to(query_NGRd.dtype)
    query = query_NGRd[span.first_row : span.first_row + rows].permute(1, 2, 0, 3)
    scores = torch.bmm(query.reshape(groups, per_group * rows, width), keys_GdT)
    scores.view(groups, per_group, rows, span.end).add_(mask_nT)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), values_GTd)
    mixed = mixed.view(groups, per_group, rows, width).permute(2, 0, 1, 3)
    return mixed.reshape(rows, groups * per_group * width)


def _span_mask(span: PrefillSpan) -> Tensor:
    """Additive causal mask [n, T] of one span."""
    rows = span.end - span.start
    return torch.full((rows, span.end), MASKED).triu_(span.start + 1)
