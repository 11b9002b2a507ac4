"""Layout of token copies by expert and their sums, as loops, to check `op.py` against.

Shapes: N tokens, K experts per token, S = N*K copies, E experts, D model width, P rows.
"""

import torch
from torch import Tensor


def plan_rows_reference(
    experts_NK: Tensor, num_experts: int, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns place_NK, source_P and ends_E as `plan_rows` does, with the fewest rows."""
    place_NK = torch.empty_like(experts_NK)
    source: list[int] = []
    ends: list[int] = []
    for expert in range(num_experts):
        for token, slot in (experts_NK == expert).nonzero().tolist():
            place_NK[token, slot] = len(source)
            source.append(token)
        source.extend([-1] * (-len(source) % align))
        ends.append(len(source))
    return place_NK, torch.tensor(source), torch.tensor(ends, dtype=torch.int32)


def permute_reference(tokens_ND: Tensor, source_P: Tensor) -> Tensor:
    """Row p is token source_P[p], or zeros."""
    rows_PD = tokens_ND.new_zeros(source_P.numel(), tokens_ND.shape[1])
    for row, token in enumerate(source_P.tolist()):
        if token >= 0:
            rows_PD[row] = tokens_ND[token]
    return rows_PD


def unpermute_reference(rows_PD: Tensor, place_NK: Tensor) -> Tensor:
    """Token n is the sum, slot after slot, of its rows, in fp32 or better."""
    wide = torch.promote_types(rows_PD.dtype, torch.float32)
    total_ND = torch.zeros(place_NK.shape[0], rows_PD.shape[1], dtype=wide)
    for slot in range(place_NK.shape[1]):
        total_ND += rows_PD[place_NK[:, slot]].to(wide)
    return total_ND
