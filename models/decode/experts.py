"""The mixture of experts of an eager pass, on the CPU.

It chooses no expert.

*One row* multiplies its experts one after another. *Few rows* are weighted sums of rows of the
expert tables: each pair of a row and an expert is one bag of `torch.embedding_bag`, so nothing is
sorted, no expert is multiplied that nobody chose, and a row's numbers are the same in any batch.
*Many rows* are sorted by expert and multiplied in groups. *Rounded weights* go expert by expert.

Shapes: N rows, K experts per token, P = N*K pairs, D model width, E experts, F expert width,
I = E*D and J = E*F rows of the tables.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.decode.weights import ExpertRows, LayerWeights
from ostinato.models.spec import ModelSpec

# A bag reads its expert's whole table, a group reads it once for all its rows. Where the table stays
# in a core's cache bags win up to 64 pairs an expert, where it does not up to 3 to 12 (measured).
_CACHED_TABLE_BYTES = 512 * 1024
_PAIRS_AN_EXPERT_CACHED = 32
_PAIRS_AN_EXPERT = 3


@dataclass(frozen=True, slots=True)
class BagPlan:
    """Bag offsets of one pass, the same for every layer."""

    inputs_D: Tensor  # rows of an expert's first table
    inner_F: Tensor  # rows of an expert's second table
    up_starts: Tensor  # [P+1] in the list of all rows of the first tables
    down_starts: Tensor  # [N+1] in that of the second; a bag sums a row's experts


class ExpertBags:
    """Decides by the shapes of a model which passes use bags."""

    def __init__(self, spec: ModelSpec) -> None:
        self._per_token = spec.experts_per_token
        self._inputs_D = torch.arange(spec.hidden_size)
        self._inner_F = torch.arange(spec.expert_hidden_size)
        self._plans: dict[int, BagPlan] = {}
        table_bytes = 4 * spec.hidden_size * 2 * spec.expert_hidden_size
        is_cached = table_bytes <= _CACHED_TABLE_BYTES
        pairs_an_expert = _PAIRS_AN_EXPERT_CACHED if is_cached else _PAIRS_AN_EXPERT
        self.most_rows = pairs_an_expert * spec.num_experts // spec.experts_per_token

    def plan(self, rows: int) -> BagPlan | None:
        """The bags of a pass over `rows`, None where another way is faster."""
        if not 1 < rows <= self.most_rows:
            return None
        if rows not in self._plans:
            per_token, inputs, inner = self._per_token, len(self._inputs_D), len(self._inner_F)
            self._plans[rows] = BagPlan(
                inputs_D=self._inputs_D,
                inner_F=self._inner_F,
                up_starts=torch.arange(0, rows * per_token * inputs + 1, inputs),
                down_starts=torch.arange(0, rows * per_token * inner + 1, per_token * inner),
            )
        return self._plans[rows]


def add_experts(
    layer: LayerWeights,
    normal_ND: Tensor,
    experts_NK: Tensor,
    shares_NK: Tensor,
    hidden_ND: Tensor,
    bags: tuple[BagPlan, ExpertRows] | None,
) -> None:
    """Adds the weighted outputs of the chosen experts to `hidden_ND` in place."""
    if layer.expert_up_EDF.dtype is not torch.float32:
        _add_rounded_experts(layer, normal_ND, experts_NK, shares_NK, hidden_ND)
    elif normal_ND.shape[0] == 1:
        for expert, share in zip(experts_NK[0].tolist(), shares_NK[0].tolist(), strict=True):
            gate, up = torch.mm(normal_ND, layer.expert_up_EDF[expert]).chunk(2, dim=-1)
            hidden_ND.addmm_(F.silu(gate).mul_(up), layer.expert_down_EFD[expert], alpha=share)
    elif bags is not None:
        _add_bags(*bags, normal_ND, experts_NK, shares_NK, hidden_ND)
    else:
        _add_groups(layer, normal_ND, experts_NK, shares_NK, hidden_ND)


def _add_bags(
    plan: BagPlan,
    tables: ExpertRows,
    normal_ND: Tensor,
    experts_NK: Tensor,
    shares_NK: Tensor,
    hidden_ND: Tensor,
) -> None:
    """Every pair's product is a sum of table rows, weighted by the elements of its input."""
    inputs_D, inner_F = plan.inputs_D, plan.inner_F
    pairs_P1 = experts_NK.view(-1, 1)
    up_rows = torch.add(inputs_D, pairs_P1, alpha=len(inputs_D)).view(-1)
    elements = torch.cat([normal_ND] * experts_NK.shape[1], dim=1).view(-1)
    inner_PF = _sum_bags(tables.up_IF, up_rows, plan.up_starts, elements)
    gate, up = inner_PF.chunk(2, dim=-1)
    weighted_PF = F.silu(gate).mul_(up).mul_(shares_NK.view(-1, 1))
    down_rows = up_rows
    if len(inner_F) != len(inputs_D):
        down_rows = torch.add(inner_F, pairs_P1, alpha=len(inner_F)).view(-1)
    hidden_ND.add_(_sum_bags(tables.down_JD, down_rows, plan.down_starts, weighted_PF.view(-1)))


def _sum_bags(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of table rows. `starts` names the end too."""
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights, True)[0]


def _add_groups(
    layer: LayerWeights, normal_ND: Tensor, experts_NK: Tensor, shares_NK: Tensor, hidden_ND: Tensor
) -> None:
    """Rows sorted by expert, one product a group."""
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
    """Products in the experts' precision, one expert after another."""
    dtype = layer.expert_up_EDF.dtype
    rounded_ND = normal_ND.to(dtype)
    for expert in experts_NK.unique().tolist():
        rows, ranks = (experts_NK == expert).nonzero(as_tuple=True)
        inner = torch.mm(rounded_ND.index_select(0, rows), layer.expert_up_EDF[expert]).float()
        gate, up = inner.chunk(2, dim=-1)
        outer = torch.mm(F.silu(gate).mul_(up).to(dtype), layer.expert_down_EFD[expert]).float()
        hidden_ND.index_add_(0, rows, outer.mul_(shares_NK[rows, ranks][:, None]))
