"""Descriptors of operands, assignment of tiles to programs, and stores, for all grouped products.

Tiles are loaded through tensor descriptors: one instruction loads a whole tile, with zeros past the
end of a dimension. Experts are a dimension of the weights' descriptor, so that a tile that
contracts past one expert's weights reads zeros, not the next expert's numbers, where a NaN would
spoil the sum.

Tiles are ordered by expert, and within an expert by bands of rows, so that concurrent programs read
the same weights and rows from the cache.

Shapes: E experts.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ostinato.kernels.grouped_gemm.op import ALIGNED_BYTES
from ostinato.kernels.mxfp8.triton_quantize import store_rows

BAND_TILES = tl.constexpr(8)


def num_programs(device: torch.device, each: int = 1) -> int:
    """Number of programs: `each` per multiprocessor, or 4 on a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor whose rows start at multiples of 16 bytes."""
    step = ALIGNED_BYTES // dtype.itemsize
    padded = triton.cdiv(shape[-1], step) * step
    return torch.empty((*shape[:-1], padded), dtype=dtype, device=device)[..., : shape[-1]]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if a descriptor cannot read it because its rows are not aligned,
    overlap or are not contiguous.
    """
    *outer, innermost = tensor.stride()
    starts = (tensor.data_ptr(), *(step * tensor.itemsize for step in outer))
    inner = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    is_apart = all(step >= size * within for step, (size, within) in zip(outer, inner, strict=True))
    if innermost == 1 and is_apart and all(start % ALIGNED_BYTES == 0 for start in starts):
        return tensor
    return aligned_empty(tuple(tensor.shape), tensor.dtype, tensor.device).copy_(tensor)


def describe(tensor: Tensor, *block: int) -> TensorDescriptor:
    """Descriptor that loads or stores blocks of an aligned tensor."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


@triton.jit
def expert_rows(ends_ptr, num_experts, EXPERTS: tl.constexpr):
    """First row and row after the last of each expert. Empty past the last expert."""
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + experts, mask=experts < num_experts, other=0)
    is_later = (experts > 0) & (experts < num_experts)
    starts = tl.load(ends_ptr + experts - 1, mask=is_later, other=0)
    return experts, starts, ends


@triton.jit
def count_tiles(ends_ptr, num_experts, tiles_n, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Tiles of all experts together."""
    _, starts, ends = expert_rows(ends_ptr, num_experts, EXPERTS)
    return tl.sum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * tiles_n


@triton.jit
def place_in_bands(tile, tiles_m, tiles_n):
    """Row and column, in tiles, of an expert's tile number `tile`."""
    band = tile // (BAND_TILES * tiles_n)
    height = tl.minimum(tiles_m - band * BAND_TILES, BAND_TILES)
    inside = tile - band * BAND_TILES * tiles_n
    return band * BAND_TILES + inside % height, inside // height


@triton.jit
def locate_tile(ends_ptr, tile, num_experts, tiles_n, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Expert, first row, row after the expert's last and column tile of tile number `tile`."""
    experts, starts, ends = expert_rows(ends_ptr, num_experts, EXPERTS)
    tiles_m = (ends - starts + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles_m, 0) * tiles_n
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    is_mine = experts == expert
    mine_m = tl.sum(tl.where(is_mine, tiles_m, 0), 0)
    local = tile - tl.sum(tl.where(is_mine, after - tiles_m * tiles_n, 0), 0)
    tile_m, tile_n = place_in_bands(local, mine_m, tiles_n)
    row = tl.sum(tl.where(is_mine, starts, 0), 0) + tile_m * BLOCK_M
    end = tl.sum(tl.where(is_mine, ends, 0), 0)
    return expert, row, end, tile_n


@triton.jit
def load_matrix(desc, index, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of matrix `index` of a stack."""
    return tl.reshape(desc.load([index, row, column]), (ROWS, COLUMNS))


@triton.jit
def store_halves(out_ptr, tile, row, end, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`store_rows` of the left half, then of the right half, so that half the shared memory suffices."""
    halves = tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    store_rows(out_ptr, left, row, end, column, width, width, ROWS, COLUMNS // 2)
    store_rows(out_ptr, right, row, end, column + COLUMNS // 2, width, width, ROWS, COLUMNS // 2)
