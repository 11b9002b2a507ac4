"""Which tile of a grouped product a program works on.

The mapping from a tile's number to its expert, rows and columns, shared by the grouped products.
Tiles go expert by expert and within an expert by bands of rows, so that programs that run at the
same time read the same weights and rows from the cache.

Shapes: E experts.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

BAND_TILES = tl.constexpr(8)


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
def locate_tile(ends_ptr, tile, num_experts, tiles_n, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Expert, first row, row after the expert's last and column tile of tile number `tile`."""
    experts, starts, ends = expert_rows(ends_ptr, num_experts, EXPERTS)
    tiles_m = (ends - starts + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles_m, 0) * tiles_n
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    is_mine = experts == expert
    mine_m = tl.sum(tl.where(is_mine, tiles_m, 0), 0)
    local = tile - tl.sum(tl.where(is_mine, after - tiles_m * tiles_n, 0), 0)
    band = local // (BAND_TILES * tiles_n)
    first_m = band * BAND_TILES
    height = tl.minimum(mine_m - first_m, BAND_TILES)
    inside = local - band * BAND_TILES * tiles_n
    row = tl.sum(tl.where(is_mine, starts, 0), 0) + (first_m + inside % height) * BLOCK_M
    end = tl.sum(tl.where(is_mine, ends, 0), 0)
    return expert, row, end, inside // height
