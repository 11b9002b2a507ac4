"""A rank's shards of tensors, and whole tensors gathered from them.

Megatron marks tensors that tensor parallelism shards, and `mark_experts` those that expert-tensor
parallelism does. Each half of a fused gate and up matrix is sharded (`partition_stride` 2).
`gather_whole` is a collective: all ranks call it in the same order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor


class Cut(NamedTuple):
    """Dimension along which a tensor is sharded over a group, and number of strides."""

    dimension: int
    strides: int
    group: dist.ProcessGroup


def mark_experts(parameter: Tensor, dimension: int, strides: int) -> None:
    """Marks a stack of experts as sharded over expert-parallel ranks, and each expert along
    `dimension` over expert-tensor-parallel ranks. Megatron then sums gradients over the ranks with
    the same part.
    """
    marked: Any = parameter
    marked.allreduce = False  # this name and the next two are Megatron's
    marked.partition_dim = dimension
    marked.partition_stride = strides


def is_expert(parameter: Tensor) -> bool:
    """Whether `mark_experts` marked the parameter."""
    return not getattr(parameter, "allreduce", True)


def mark_heads(parameter: Tensor, rows: tuple[int, ...]) -> None:
    """Marks a matrix of heads with the row counts of one head. Its shards hold whole heads."""
    marked: Any = parameter
    marked.head_rows = rows


def head_rows(parameter: Tensor) -> tuple[int, ...]:
    """Row counts that `mark_heads` set. Empty if it did not mark the parameter."""
    return getattr(parameter, "head_rows", ())


def find_cuts(parameter: Tensor) -> tuple[Cut, ...]:
    """Cuts of a parameter. Empty: every rank holds all of it."""
    dimension = getattr(parameter, "partition_dim", -1)
    strides = getattr(parameter, "partition_stride", 1)
    if is_expert(parameter):
        experts = parallel_state.get_expert_model_parallel_group(check_initialized=False)
        widths = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
        cuts = [(0, 1, experts), (dimension, strides, widths)]
    else:
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        cuts = [(dimension, strides, group)]
    return tuple(
        Cut(dimension, strides, group)
        for dimension, strides, group in cuts
        if isinstance(group, dist.ProcessGroup) and group.size() > 1 and dimension >= 0
    )


def matrix_cuts(parameter: Tensor) -> tuple[Cut, ...]:
    """Cuts that leave a rank with a part of each matrix, rather than fewer whole matrices of a
    stack or fewer whole heads.
    """
    if head_rows(parameter):
        return ()
    return tuple(cut for cut in find_cuts(parameter) if cut.dimension >= parameter.ndim - 2)


def replica_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Ranks that hold the same matrices once parts are gathered: for experts the ranks with the
    same expert-tensor index, for heads those with the same tensor index. None: groups are not open.
    """
    if is_expert(parameter):
        group = parallel_state.get_expert_data_parallel_group(check_initialized=False)
    elif head_rows(parameter) and find_cuts(parameter):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_tensor_and_data_parallel_group(
            check_initialized=False, with_context_parallel=True
        )
    return group if isinstance(group, dist.ProcessGroup) else None


def state_replica_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Ranks over which a parameter's optimiser state is sharded: those that hold the same part of
    it, without tensor-parallel ranks that hold the same whole. None: groups are not open.
    """
    if is_expert(parameter):
        return replica_group(parameter)
    if not parallel_state.model_parallel_is_initialized():
        return None
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def gather_whole(part: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """The whole tensor from the ranks' parts."""
    for cut in cuts:
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for _ in range(cut.group.size())
        ]
        dist.all_gather(parts, part.contiguous(), group=cut.group)
        pieces = [one.chunk(cut.strides, cut.dimension) for one in parts]
        part = torch.cat(
            [piece[stride] for stride in range(cut.strides) for piece in pieces], cut.dimension
        )
    return part


def local_shard(whole: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """This rank's part of a whole tensor."""
    for cut in cuts:
        pieces = whole.chunk(cut.strides * cut.group.size(), cut.dimension)
        whole = torch.cat(pieces[cut.group.rank() :: cut.group.size()], cut.dimension)
    return whole


def sharded_parts(
    key: str, tensor: Tensor, parameter: Tensor, copy: int = 0, *, is_owned: bool = False
) -> list[ShardedTensor]:
    """This rank's parts of a tensor for Megatron's checkpoints. The tensor is sharded like
    `parameter`, unless it is a scalar. `copy` counts the earlier pipeline stages that hold it too.
    `is_owned`: of the ranks with the same part of the parameter, only this one has the tensor.
    """
    cuts = find_cuts(parameter) if tensor.ndim else ()
    copies = _owners_of_copies(parameter, cuts) if is_owned else _copies(parameter, tensor, cuts)
    replica_id = (copy, 0 if copies is None else dist.get_rank(copies))
    pieces: list[tuple[Tensor, list[tuple[int, int, int]]]] = [(tensor.view(tensor.shape or 1), [])]
    for cut in cuts:
        ranks, rank = cut.group.size(), cut.group.rank()
        pieces = [
            (one, [*places, (cut.dimension, stride * ranks + rank, cut.strides * ranks)])
            for piece, places in pieces
            for stride, one in enumerate(piece.chunk(cut.strides, cut.dimension))
        ]
    return [
        ShardedTensor.from_rank_offsets(key, piece, *places, replica_id=replica_id)
        for piece, places in pieces
    ]


def _copies(parameter: Tensor, tensor: Tensor, cuts: Sequence[Cut]) -> Any:
    """Ranks of a stage that hold the same part of a tensor."""
    if is_expert(parameter) and tensor.ndim:
        return parallel_state.get_expert_data_parallel_group()
    if not cuts:
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _owners_of_copies(parameter: Tensor, cuts: Sequence[Cut]) -> Any:
    """Ranks that may each own a copy of the same part of a tensor. None: a single rank does."""
    if cuts:
        return None
    if is_expert(parameter):
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
