"""Newton-Schulz iteration of Muon, divided among the ranks that hold the same matrices.

Shapes: M matrices, R rows, C columns, R <= C.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# coefficients of Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon)
QUINTIC = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices_MRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns matrices with the same singular vectors and singular values near 1."""
    working = matrices_MRC.to(dtype)
    working = working / (working.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    linear, cubic, fifth = QUINTIC
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = working @ working.mT
        working = torch.baddbmm(
            working, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=fifth), working, beta=linear
        )
    return working.to(matrices_MRC.dtype)


def orthogonalise_all(
    stacks: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """`orthogonalise_shared` of stacks of any shapes, wide or tall. Stacks of equal shape are joined."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    wide = [one if one.shape[-2] <= one.shape[-1] else one.mT for one in stacks]
    for index, one in enumerate(wide):
        by_shape.setdefault((one.shape[-2], one.shape[-1]), []).append(index)
    joined = [torch.cat([wide[index] for index in same]) for same in by_shape.values()]
    results: dict[int, Tensor] = {}
    for same, whole in zip(
        by_shape.values(), orthogonalise_shared(joined, dtype, group), strict=True
    ):
        results |= zip(same, whole.split([len(wide[index]) for index in same]), strict=True)
    return [
        results[index] if one.shape == wide[index].shape else results[index].mT
        for index, one in enumerate(stacks)
    ]


def orthogonalise_shared(
    stacks: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """`orthogonalise` of stacks that every rank of a group holds. Each rank computes its share, and
    the results are gathered. `group` None: no other rank holds them.
    """
    if group is None or group.size() == 1:
        return [orthogonalise(stack, dtype) for stack in stacks]
    gathers = []
    for stack, counts in zip(
        stacks, assign_to_ranks([tuple(one.shape) for one in stacks], group.size()), strict=True
    ):
        shares = stack.split(counts)
        mine = shares[group.rank()]
        padded = mine.new_zeros((max(counts), *stack.shape[1:]), dtype=dtype)
        if len(mine):
            padded[: len(mine)] = orthogonalise(mine, dtype)
        parts = [torch.empty_like(padded) for _ in counts]
        gathers.append((parts, counts, dist.all_gather(parts, padded, group=group, async_op=True)))
    whole = []
    for stack, (parts, counts, gather) in zip(stacks, gathers, strict=True):
        gather.wait()
        pieces = [part[:count] for part, count in zip(parts, counts, strict=True)]
        whole.append(torch.cat(pieces).to(stack.dtype))
    return whole


def assign_to_ranks(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[list[int]]:
    """Number of matrices of each stack by rank: equal numbers, with the remainder on the ranks with
    the least work so far.
    """
    loads = [0] * ranks
    assigned: dict[int, list[int]] = {}
    costs = [rows**2 * columns for _, rows, columns in shapes]
    for index in sorted(range(len(shapes)), key=lambda one: -costs[one]):
        each, left = divmod(shapes[index][0], ranks)
        idlest = sorted(range(ranks), key=lambda rank: loads[rank])[:left]
        counts = [each + (rank in idlest) for rank in range(ranks)]
        loads = [load + count * costs[index] for load, count in zip(loads, counts, strict=True)]
        assigned[index] = counts
    return [assigned[index] for index in range(len(shapes))]
