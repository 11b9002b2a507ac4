"""Context parallelism: each row is split over ranks, and attention covers the whole row.

A row is split into twice as many chunks as there are ranks, and rank r takes chunks r and
2 ranks - 1 - r. With causal attention early chunks see few keys and late chunks many, so the ranks
compute equally much. Keys are gathered, their gradients summed and scattered. (On CUDA Transformer
Engine has attention that passes keys on while it computes.)

Shapes: T tokens of a row.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.rope import stretch_frequencies
from ostinato.models.spec import ModelSpec


def context_ranks() -> int:
    """Ranks that share a row."""
    return parallel_state.get_context_parallel_world_size()


def context_rank() -> int:
    """This rank's index among those that share a row."""
    return parallel_state.get_context_parallel_rank()


def data_and_context_group() -> dist.ProcessGroup:
    """Group of the data-parallel and context-parallel ranks."""
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def local_chunks() -> tuple[int, int]:
    """Indices of this rank's chunks among the 2 x `context_ranks` chunks of a row."""
    rank = context_rank()
    return rank, 2 * context_ranks() - 1 - rank


def local_rows(whole: Tensor, dimension: int = 0) -> Tensor:
    """This rank's chunks of rows that lie along `dimension`."""
    if context_ranks() == 1:
        return whole
    chunks = whole.chunk(2 * context_ranks(), dimension)
    return torch.cat([chunks[chunk] for chunk in local_chunks()], dimension)


def gather_parts(part: Tensor) -> Tensor:
    """All ranks' parts along the first dimension, rank after rank."""
    group: Any = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(part, group=group)


def gather_scores(mine: Tensor) -> Tensor:
    """Whole rows from the ranks' parts, along the first dimension. All ranks then compute the same,
    so in backward each takes only the gradient of its own part.
    """
    if context_ranks() == 1:
        return mine
    group: Any = parallel_state.get_context_parallel_group()
    return restore_order(
        gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False, group=group)
    )


def restore_order(parts: Tensor, tensor_ranks: int = 1) -> Tensor:
    """Whole rows from gathered parts. With `tensor_ranks` > 1, that many gathered parts follow one
    another, each with a section of every rank's tokens.
    """
    ranks = context_ranks()
    if tensor_ranks > 1:
        parts = parts.unflatten(0, (tensor_ranks, ranks, -1)).transpose(0, 1).flatten(0, 2)
    chunks = parts.chunk(2 * ranks)
    return torch.cat(chunks[0::2] + chunks[1::2][::-1])


class RowRotaryEmbedding(RotaryEmbedding):
    """Megatron's RoPE angles for this rank's tokens. Megatron's own selection needs pinned memory."""

    positions_T: Tensor | None = None  # positions of the tokens; None: consecutive ones

    def forward(self, max_seq_len: int, offset: int = 0, **_: Any) -> Tensor:  # type: ignore[override]
        """Angles [T, 1, 1, width] for rows of `max_seq_len` tokens."""
        angles = super().forward(max_seq_len, offset, packed_seq=True)
        return local_rows(angles) if self.positions_T is None else angles[self.positions_T]


def row_rotary(spec: ModelSpec) -> RowRotaryEmbedding:
    """The RoPE of a shape, on the process's device."""
    factor = spec.rope_scaling_factor
    rotary = RowRotaryEmbedding(
        kv_channels=spec.head_dim,
        rotary_percent=spec.rotary_fraction,
        seq_len_interpolation_factor=factor if factor > 1 else None,  # type: ignore[arg-type]
        rotary_base=spec.rope_base,  # type: ignore[arg-type]
        use_cpu_initialization=True,
    )
    if spec.rope_bands is not None:
        rotary.inv_freq = stretch_frequencies(rotary.inv_freq, spec.rope_bands)
    rotary.inv_freq = rotary.inv_freq.to(current_device())
    return rotary
