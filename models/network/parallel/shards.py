"""A rank's part of each tensor, and the whole that the ranks hold together.

Megatron marks what tensor parallelism cuts. A fused gate and up matrix is cut in each of its halves
(`partition_stride` 2). `gather_whole` is a collective: all ranks call it in the same order.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor


class Cut(NamedTuple):
    """Dimension along which ranks of a group hold parts, and in how many strides."""

    dimension: int
    strides: int
    group: dist.ProcessGroup


def mark_experts(parameter: Tensor) -> None:
    """Marks a stack of experts: whole experts lie on the ranks of expert parallelism, and Megatron
    sums their gradients over the ranks that hold the same ones.
    """
    parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's name


def is_expert(parameter: Tensor) -> bool:
    """True for what `mark_experts` marked."""
    return not getattr(parameter, "allreduce", True)


def find_cut(parameter: Tensor) -> Cut | None:
    """How a parameter is cut. None: every rank holds all of it."""
    if is_expert(parameter):
        group = parallel_state.get_expert_model_parallel_group(check_initialized=False)
        dimension, strides = 0, 1
    else:
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        dimension = getattr(parameter, "partition_dim", -1)
        strides = getattr(parameter, "partition_stride", 1)
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1 or dimension < 0:
        return None
    return Cut(dimension, strides, group)


def matrix_holders(parameter: Tensor) -> dist.ProcessGroup | None:
    """Ranks that have the same matrices when tensor-parallel parts are gathered; None: groups are not open."""
    if is_expert(parameter):
        group = parallel_state.get_expert_data_parallel_group(check_initialized=False)
    else:
        group = parallel_state.get_tensor_and_data_parallel_group(
            check_initialized=False, with_context_parallel=True
        )
    return group if isinstance(group, dist.ProcessGroup) else None


def gather_whole(part: Tensor, cut: Cut | None) -> Tensor:
    """The whole tensor from the ranks' parts."""
    if cut is None:
        return part
    parts = [
        torch.empty_like(part, memory_format=torch.contiguous_format)
        for _ in range(cut.group.size())
    ]
    dist.all_gather(parts, part.contiguous(), group=cut.group)
    pieces = [one.chunk(cut.strides, cut.dimension) for one in parts]
    return torch.cat(
        [piece[stride] for stride in range(cut.strides) for piece in pieces], cut.dimension
    )


def cut_mine(whole: Tensor, cut: Cut | None) -> Tensor:
    """This rank's part of a whole tensor."""
    if cut is None:
        return whole
    pieces = whole.chunk(cut.strides * cut.group.size(), cut.dimension)
    return torch.cat(pieces[cut.group.rank() :: cut.group.size()], cut.dimension)


def sharded_parts(
    key: str, tensor: Tensor, parameter: Tensor, copy: int = 0
) -> list[ShardedTensor]:
    """This rank's parts of a tensor, as Megatron's checkpoints describe them. It is cut as `parameter`
    is; a single number is not. `copy` counts the pipeline stages before this one that hold it too.
    """
    cut = find_cut(parameter) if tensor.ndim else None
    copies: Any
    if is_expert(parameter) and tensor.ndim:
        copies = parallel_state.get_expert_data_parallel_group()
    elif cut is None:
        copies = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
    replica_id = (copy, dist.get_rank(copies))
    if cut is None:
        return [
            ShardedTensor.from_rank_offsets(
                key, tensor.view(tensor.shape or 1), replica_id=replica_id
            )
        ]
    ranks, rank = cut.group.size(), cut.group.rank()
    return [
        ShardedTensor.from_rank_offsets(
            key,
            piece,
            (cut.dimension, stride * ranks + rank, cut.strides * ranks),
            replica_id=replica_id,
        )
        for stride, piece in enumerate(tensor.chunk(cut.strides, cut.dimension))
    ]
