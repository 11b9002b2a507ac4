"""The trunk's forward pass over the slot cache, in eager torch.

`Trunk`: embedding, attention against cached keys and values, and the choice of experts, whose
products are in experts.py. Products are in the precision of the weights, all else in float32. It
samples nothing. The formulae are those of the trainer's model; only the order of roundings differs.

Shapes: N rows, B decoding slots, m rows a decoding slot, A attended slots, T keys, L layers, D
model width, H query heads, G key/value heads, R query heads a group, d head width, E experts, K
experts per token, X = m*R rows of a mask, n rows of one prefill span.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.decode.batch import MASKED, BatchPlan, DecodePlan, PrefillSpan
from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.experts import ExpertBags, add_experts
from ostinato.models.decode.weights import DecodeWeights, LayerWeights
from ostinato.models.spec import ModelSpec

_Memory = tuple[Tensor, Tensor]  # keys and values of one layer


@dataclass(frozen=True, slots=True)
class _Attention:
    """Buffers of attention in one pass beside queries. The lists have one entry per layer."""

    plan: BatchPlan
    memory: list[_Memory]  # of the decoding slots
    mask: Tensor | None  # of the decode rows
    span_masks: list[Tensor]
    run: list[_Memory] | None  # where the rows' own keys and values lie, if one after another


class Trunk:
    """Constants of a shape and the forward pass that uses them."""

    def __init__(self, spec: ModelSpec, positions: int, device: str = "cpu") -> None:
        self._spec = spec
        self._groups = spec.num_query_groups
        self._queries_per_group = spec.num_attention_heads // spec.num_query_groups
        self._bags = ExpertBags(spec)
        self._epsilon = torch.tensor(spec.norm_epsilon, device=device)
        self.rotation_C1d = rotation_table(spec, positions).to(device)
        self._positions = positions
        self._tail_1XT = torch.zeros(1, 0, 0)  # mask of rows at the end of a slot, see _tail_mask

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
        attention = self._prepare_attention(plan, cache)
        bags, tables = self._bags.plan(len(hidden_ND)), weights.expert_rows
        routes = []
        for index, layer in enumerate(weights.layers):
            attended_NO = self._attend(layer, index, hidden_ND, rotation_N1d, attention, cache)
            hidden_ND = add_product(hidden_ND, attended_NO, layer.output_OD)
            normal_ND = self.normalize(hidden_ND)
            experts_NK, shares_NK = self.route(layer, normal_ND)
            routes.append(experts_NK)
            own_bags = None if bags is None or tables is None else (bags, tables[index])
            add_experts(layer, normal_ND, experts_NK, shares_NK, hidden_ND, own_bags)
        return self.normalize(hidden_ND).mul_(weights.final_norm_D), torch.stack(routes, dim=1)

    def _prepare_attention(self, plan: BatchPlan, cache: SlotCache) -> _Attention:
        run, mask = None, None
        if plan.write_indices is None:
            run = cache.run_layers(
                int(plan.slots[0]), int(plan.positions[0]), int(plan.positions[-1]) + 1
            )
        if plan.decode is not None:
            mask = self._decode_mask(plan.decode)
        return _Attention(
            plan=plan,
            memory=_attended_memory(cache, plan.decode),
            mask=mask,
            span_masks=[_span_mask(span) for span in plan.spans],
            run=run,
        )

    def _decode_mask(self, plan: DecodePlan) -> Tensor | None:
        """Additive mask of the decode rows' scores, [A*G, m*R, T] or what stretches to it."""
        per_group, context, width = self._queries_per_group, plan.context, plan.width
        if plan.mask_AmT is not None:
            shape = (plan.attended, self._groups, width, per_group, context)
            mask_A1m1T = plan.mask_AmT.view(plan.attended, 1, width, 1, context)
            return mask_A1m1T.expand(shape).reshape(-1, width * per_group, context)
        if width == 1:
            return None
        return self._tail_mask(width, context)

    def _tail_mask(self, width: int, context: int) -> Tensor:
        """Each of the last `width` positions sees those up to itself: [1, m*R, T], cut out of a
        table that is made for the most rows met.
        """
        per_group, positions = self._queries_per_group, self._positions
        if self._tail_1XT.shape[1] < width * per_group:
            tail_mT = torch.zeros(width, positions + width)
            tail_mT[:, positions:] = torch.full((width, width), MASKED).triu_(1)
            self._tail_1XT = tail_mT.repeat_interleave(per_group, dim=0)[None]
        rows_1XT = self._tail_1XT.narrow(1, 0, width * per_group)
        return rows_1XT.narrow(2, positions + width - context, context)

    def _attend(
        self,
        layer: LayerWeights,
        index: int,
        hidden_ND: Tensor,
        rotation_N1d: Tensor,
        attention: _Attention,
        cache: SlotCache,
    ) -> Tensor:
        heads, groups, width = self._spec.num_attention_heads, self._groups, self._spec.head_dim
        plan, rows = attention.plan, hidden_ND.shape[0]
        qk_NHd, values_NGd = self.project_heads(layer, hidden_ND, rotation_N1d)
        query_NHd, keys_NGd = qk_NHd.split_with_sizes((heads, groups), dim=1)
        if attention.run is not None:
            own_keys_NGd, own_values_NGd = attention.run[index]
            own_keys_NGd.copy_(keys_NGd)
            own_values_NGd.copy_(values_NGd)
        else:
            assert plan.write_indices is not None
            cache.write_layer(index, plan.write_indices, keys_NGd, values_NGd)
        query_NGRd = query_NHd.view(rows, groups, self._queries_per_group, width)
        parts = []
        if plan.decode is not None:
            memory, first = attention.memory[index], plan.decode.slots * plan.decode.width
            if not plan.spans:
                return _attend_decode(query_NGRd, memory, plan.decode, attention.mask)
            parts.append(_attend_decode(query_NGRd[:first], memory, plan.decode, attention.mask))
        for span, mask in zip(plan.spans, attention.span_masks, strict=True):
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
        qk_NHd, values_NGd = qkv_NHd.split_with_sizes((heads + groups, groups), dim=1)
        qk_NHd = self.normalize(qk_NHd).mul_(layer.qk_scale_Hd)
        paired = qk_NHd.view(rows, heads + groups, width // 2, 2)  # shares the elements
        torch.view_as_complex(paired).mul_(rotation_N1d)
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
    """Base plus rows times a matrix [in, out]. Only the product is in the matrix's precision."""
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


def _attended_memory(cache: SlotCache, plan: DecodePlan | None) -> list[_Memory]:
    """Keys and values of the decoding slots a layer: views of a range, or all slots to gather."""
    if plan is None:
        return []
    if plan.gather_A is None:
        keys, values = cache.range_views(plan.first_slot, plan.attended)
        keys, values = keys.narrow(3, 0, plan.context), values.narrow(2, 0, plan.context)
    else:
        keys = cache.keys_LSGdC.narrow(4, 0, plan.context)
        values = cache.values_LSGCd.narrow(3, 0, plan.context)
    return list(zip(keys.unbind(0), values.unbind(0), strict=True))


def _attend_decode(
    query_NGRd: Tensor, memory: _Memory, plan: DecodePlan, mask: Tensor | None
) -> Tensor:
    """Attention of all decode rows at once. Returns [B*m, H*d]. The rows of a slot and the query
    heads of a group are rows of one product, so that keys are read once per group.
    """
    _, groups, per_group, width = query_NGRd.shape
    count, rows, attended = plan.slots, plan.width, plan.attended
    query, (keys, values) = query_NGRd, memory
    if rows > 1:
        query = query.view(count, rows, groups, per_group * width).transpose(1, 2)
    if plan.gather_A is not None:
        keys = keys.index_select(0, plan.gather_A).flatten(0, 1)
        values = values.index_select(0, plan.gather_A).flatten(0, 1)
    if keys.dtype is not query.dtype:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    if plan.row_of_slot_B is not None:
        spread = query.new_zeros(attended, *query.shape[1:])
        query = spread.index_copy_(0, plan.row_of_slot_B, query)
    query = query.reshape(attended * groups, rows * per_group, width)
    scores = torch.bmm(query, keys) if mask is None else torch.baddbmm(mask, query, keys)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
    if plan.row_of_slot_B is not None:
        mixed = mixed.view(attended, -1).index_select(0, plan.row_of_slot_B)
    if rows > 1:
        mixed = mixed.view(count, groups, rows, per_group * width).transpose(1, 2)
    return mixed.reshape(count * rows, groups * per_group * width)


def _attend_span(query_NGRd: Tensor, memory: _Memory, span: PrefillSpan, mask_nT: Tensor) -> Tensor:
    """Attention of one prefill span against its own slot. Returns [n, H*d]."""
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
