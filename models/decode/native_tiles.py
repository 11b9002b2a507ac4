"""Vector tiles that numba compiles for this processor: the only place that writes LLVM.

Owns `accumulate`, a matrix product that adds to its result, on flat float32 arrays with offsets and
strides. A tile keeps 1 to 4 rows by 16, 32 or 64 columns of the result in registers over the whole
depth. Each element is one chain of fused multiply-adds over the depth in order, whatever tile it
falls in: a row's result does not depend on the rows beside it. Needs numba; imported
only where compiled decoding was asked for.

Shapes: N rows, K depth, O columns.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from models.decode.packed import LANES

JIT: dict[str, Any] = {
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "nnan"},
}
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INDEX = ir.IntType(64)


def _tile(rows: int, vectors: int) -> Callable[..., None]:
    """An operation y[rows, 16 * vectors] += x[rows, depth] @ w[depth, 16 * vectors] in registers."""

    @intrinsic
    def tile(typing_context, x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth):
        index = types.intp
        signature = types.void(x, index, index, w, index, index, y, index, index, index)
        return signature, _generate

    def _generate(context, builder, signature, arguments):
        kinds = signature.args
        x_data = make_array(kinds[0])(context, builder, arguments[0]).data
        w_data = make_array(kinds[3])(context, builder, arguments[3]).data
        y_data = make_array(kinds[6])(context, builder, arguments[6]).data
        x_at, x_step, w_at, w_step = (arguments[place] for place in (1, 2, 4, 5))
        y_at, y_step, depth = (arguments[place] for place in (7, 8, 9))
        fused = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )

        def vector_at(data: ir.Value, offset: ir.Value) -> ir.Value:
            place = builder.gep(data, [offset], source_etype=_FLOAT)
            return builder.bitcast(place, _VECTOR.as_pointer())

        def moved(start: ir.Value, step: ir.Value, count: int, lanes: int) -> ir.Value:
            by_rows = builder.mul(step, ir.Constant(_INDEX, count))
            return builder.add(builder.add(start, by_rows), ir.Constant(_INDEX, lanes))

        sums = [
            [cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(rows)
        ]
        for row in range(rows):
            for part in range(vectors):
                place = vector_at(y_data, moved(y_at, y_step, row, LANES * part))
                builder.store(builder.load(place, align=4, typ=_VECTOR), sums[row][part])
        x_starts = [moved(x_at, x_step, row, 0) for row in range(rows)]
        with cgutils.for_range(builder, depth) as loop:
            w_row = builder.add(w_at, builder.mul(w_step, loop.index))
            columns = [
                builder.load(
                    vector_at(w_data, builder.add(w_row, ir.Constant(_INDEX, LANES * part))),
                    align=4,
                    typ=_VECTOR,
                )
                for part in range(vectors)
            ]
            for row in range(rows):
                place = builder.gep(
                    x_data, [builder.add(x_starts[row], loop.index)], source_etype=_FLOAT
                )
                lone = builder.insert_element(
                    ir.Constant(_VECTOR, ir.Undefined),
                    builder.load(place, typ=_FLOAT),
                    ir.Constant(ir.IntType(32), 0),
                )
                zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                factor = builder.shuffle_vector(lone, ir.Constant(_VECTOR, ir.Undefined), zeros)
                for part in range(vectors):
                    old = builder.load(sums[row][part], typ=_VECTOR)
                    builder.store(
                        builder.call(fused, [factor, columns[part], old]), sums[row][part]
                    )
        for row in range(rows):
            for part in range(vectors):
                place = vector_at(y_data, moved(y_at, y_step, row, LANES * part))
                builder.store(builder.load(sums[row][part], typ=_VECTOR), place, align=4)
        return context.get_dummy_value()

    return tile


_tile_1_64, _tile_2_64, _tile_3_64, _tile_4_64 = (_tile(rows, 4) for rows in (1, 2, 3, 4))
_tile_1_32, _tile_2_32, _tile_3_32, _tile_4_32 = (_tile(rows, 2) for rows in (1, 2, 3, 4))
_tile_1_16, _tile_2_16, _tile_3_16, _tile_4_16 = (_tile(rows, 1) for rows in (1, 2, 3, 4))


@numba.njit(**JIT)
def _columns_64(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, rows, depth):
    row = 0
    while row + 4 <= rows:
        _tile_4_64(
            x, x_at + row * x_step, x_step, w, w_at, w_step, y, y_at + row * y_step, y_step, depth
        )
        row += 4
    x_at += row * x_step
    y_at += row * y_step
    if rows - row == 1:
        _tile_1_64(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)
    elif rows - row == 2:
        _tile_2_64(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)
    elif rows - row == 3:
        _tile_3_64(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)


@numba.njit(**JIT)
def _columns_32(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, rows, depth):
    row = 0
    while row + 4 <= rows:
        _tile_4_32(
            x, x_at + row * x_step, x_step, w, w_at, w_step, y, y_at + row * y_step, y_step, depth
        )
        row += 4
    x_at += row * x_step
    y_at += row * y_step
    if rows - row == 1:
        _tile_1_32(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)
    elif rows - row == 2:
        _tile_2_32(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)
    elif rows - row == 3:
        _tile_3_32(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)


@numba.njit(**JIT)
def _columns_16(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, rows, depth):
    row = 0
    while row + 4 <= rows:
        _tile_4_16(
            x, x_at + row * x_step, x_step, w, w_at, w_step, y, y_at + row * y_step, y_step, depth
        )
        row += 4
    x_at += row * x_step
    y_at += row * y_step
    if rows - row == 1:
        _tile_1_16(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)
    elif rows - row == 2:
        _tile_2_16(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)
    elif rows - row == 3:
        _tile_3_16(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, depth)


@numba.njit(**JIT)
def accumulate(x, x_at, x_step, w, w_at, w_step, y, y_at, y_step, rows, depth, columns):
    """y[N, O] += x[N, K] @ w[K, O], each a flat array from an offset on with a step a row. O is a
    multiple of 16.
    """
    at = 0
    while at + 64 <= columns:
        _columns_64(x, x_at, x_step, w, w_at + at, w_step, y, y_at + at, y_step, rows, depth)
        at += 64
    if at + 32 <= columns:
        _columns_32(x, x_at, x_step, w, w_at + at, w_step, y, y_at + at, y_step, rows, depth)
        at += 32
    if at + 16 <= columns:
        _columns_16(x, x_at, x_step, w, w_at + at, w_step, y, y_at + at, y_step, rows, depth)


def _float_of_bits(typing_context, bits):
    """The float32 whose bits are an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


def _bits_of_float(typing_context, value):
    """The bits of a float32 as an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


float_of_bits: Any = intrinsic(_float_of_bits)
bits_of_float: Any = intrinsic(_bits_of_float)
