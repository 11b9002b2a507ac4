"""Register tiles of matrix products, written as LLVM for this processor.

`accumulate` is a float32 matrix product that adds to its result or overwrites it. The matrix is
float32, or bf16 that becomes float32 in registers. A tile keeps up to 6 rows by 16, 32 or 64
columns of the result in registers over the whole depth. With AVX-512 it uses 24 sums, 4 vectors of
weights and 1 factor of the 32 registers; without it 12 sums, 2 vectors and 1 factor of the 16
registers, which have half the length. Each element is one chain of fused multiply-adds over the
depth in order, whatever its tile, so a row's result does not depend on the other rows. Needs numba;
imported only for compiled decoding.

Shapes: N rows, K depth, O columns.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from ostinato.models.decode.compiled.packed import PANEL
from ostinato.models.decode.compiled.vectors import (
    BARE,
    FLOAT,
    VECTOR,
    fused_multiply_add,
    index_of,
    layout_of,
    load_items,
    moved,
    spread,
    vector_at,
)
from ostinato.models.decode.supported import LANES

_MAX_ROWS = 6
_settings: Any = config  # untyped, since numba adds its settings when it is imported
_FEATURES = _settings.CPU_FEATURES  # of the processor that numba compiles for; None: this one
_IS_LONG = (
    bool(get_host_cpu_features().get("avx512f")) if _FEATURES is None else "+avx512f" in _FEATURES
)
# Columns of the widest tile whose sums fit in the registers, by number of rows minus 1.
_WIDEST = (64,) * _MAX_ROWS if _IS_LONG else (64, 16, 16, 16, 16, 16)
_AHEAD_BYTES = 2048  # how far ahead of its reads a packed panel is prefetched
_LINE_BYTES = 64


def _prefetch(
    builder: ir.IRBuilder, pointer: Any, offset: Any, items: int, item: types.Type
) -> None:
    """Prefetches `items` items: whole panel rows into the nearest cache, those of narrower tiles,
    which are read later, into the second. The memory need not be mapped.
    """
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    locality = 3 if items == PANEL else 2
    reading, nearest, data = (ir.Constant(number, value) for value in (0, locality, 1))
    llvm_item, item_bytes = layout_of(item)
    for first in range(0, items, _LINE_BYTES // item_bytes):
        place = builder.gep(pointer, [builder.add(offset, index_of(first))], source_etype=llvm_item)
        builder.call(prefetch, [builder.bitcast(place, byte), reading, nearest, data])


def _write_tile(
    builder: ir.IRBuilder, rows: int, vectors: int, item: types.Type, arguments: list[ir.Value]
) -> None:
    """y[rows, 16 * vectors] += x[rows, depth] @ w[depth, 16 * vectors], from zero if `is_new`.
    `item`: item type of w.
    """
    x, x_step, w, w_step, y, y_step, depth, is_new = arguments
    fused = fused_multiply_add(builder)
    sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(vectors)] for _ in range(rows)]
    places = [
        [
            vector_at(
                builder, y, builder.add(builder.mul(y_step, index_of(row)), index_of(LANES * part))
            )
            for part in range(vectors)
        ]
        for row in range(rows)
    ]
    with builder.if_else(builder.icmp_signed("!=", is_new, index_of(0))) as (fresh, kept):
        with fresh:
            for row in range(rows):
                for part in range(vectors):
                    builder.store(ir.Constant(VECTOR, [0.0] * LANES), sums[row][part])
        with kept:
            for row in range(rows):
                for part in range(vectors):
                    old = builder.load(places[row][part], align=4, typ=VECTOR)
                    builder.store(old, sums[row][part])
    x_rows = [
        builder.gep(
            builder.inttoptr(x, FLOAT.as_pointer()),
            [builder.mul(x_step, index_of(row))],
            source_etype=FLOAT,
        )
        for row in range(rows)
    ]
    is_panel = builder.icmp_signed("==", w_step, index_of(PANEL))
    # A narrow tile prefetches its own part of the next panel; its neighbours prefetch theirs.
    is_whole = vectors * LANES == PANEL
    in_panel = index_of(_AHEAD_BYTES // layout_of(item)[1])
    ahead_items = in_panel if is_whole else builder.mul(depth, index_of(PANEL))
    ahead = builder.select(is_panel, ahead_items, index_of(PANEL))
    with cgutils.for_range(builder, depth) as loop:
        w_row = builder.mul(w_step, loop.index)
        _prefetch(builder, w, builder.add(w_row, ahead), vectors * LANES, item)
        columns = [
            load_items(builder, w, builder.add(w_row, index_of(LANES * part)), item)
            for part in range(vectors)
        ]
        for row in range(rows):
            place = builder.gep(x_rows[row], [loop.index], source_etype=FLOAT)
            factor = spread(builder, builder.load(place, typ=FLOAT))
            for part in range(vectors):
                old = builder.load(sums[row][part], typ=VECTOR)
                builder.store(builder.call(fused, [factor, columns[part], old]), sums[row][part])
    for row in range(rows):
        for part in range(vectors):
            builder.store(builder.load(sums[row][part], typ=VECTOR), places[row][part], align=4)


def _tiles(vectors: int) -> Callable[..., Any]:
    """The tiles of 16 * vectors columns that fit into registers, chosen by their rows."""

    @intrinsic
    def tiles(typing_context, rows, x, x_step, w, w_step, y, y_step, depth, is_new):
        return types.void(*[types.int64] * 3, w, *[types.int64] * 5), _generate

    def _generate(context, builder, signature, arguments):
        end = builder.append_basic_block("tiles.end")
        choice = builder.switch(arguments[0], end)
        for rows in range(1, _MAX_ROWS + 1):
            if vectors * LANES > _WIDEST[rows - 1]:
                continue
            block = builder.append_basic_block(f"tiles.{rows}")
            choice.add_case(index_of(rows), block)
            builder.position_at_end(block)
            _write_tile(builder, rows, vectors, signature.args[3].dtype, arguments[1:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return tiles


_tiles_64, _tiles_32, _tiles_16 = _tiles(4), _tiles(2), _tiles(1)


@numba.njit(**BARE)
def accumulate(x, x_step, w, w_step, y, y_step, rows, depth, columns, is_new):
    """y[N, O] += x[N, K] @ w[K, O]. x and y are each an address and a row stride in elements. w is
    a pointer; its type selects the tiles. `is_new`: y is overwritten. O is a multiple of 16.
    """
    at = 0
    while at < columns:
        panel = min(columns - at, PANEL)
        x_block, y_block, row = x, y + 4 * at, 0
        while row < rows:
            # of even sizes: 7 rows are 4 and 3
            blocks = (rows - row + _MAX_ROWS - 1) // _MAX_ROWS
            some = (rows - row + blocks - 1) // blocks
            part = 0
            while part < panel:
                most = min(panel - part, _WIDEST[some - 1])
                w_tile, y_tile = moved(w, at + part), y_block + 4 * part
                if most >= 64:
                    _tiles_64(some, x_block, x_step, w_tile, w_step, y_tile, y_step, depth, is_new)
                    part += 64
                elif most >= 32:
                    _tiles_32(some, x_block, x_step, w_tile, w_step, y_tile, y_step, depth, is_new)
                    part += 32
                else:
                    _tiles_16(some, x_block, x_step, w_tile, w_step, y_tile, y_step, depth, is_new)
                    part += 16
            row += some
            x_block += 4 * some * x_step
            y_block += 4 * some * y_step
        at += panel
