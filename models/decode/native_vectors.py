"""Vectors of 16 float32 that numba compiles for this processor: what the compiled loops share.

Owns how functions are compiled (`JIT`, `BARE`), `rotate_pairs`, `largest_of`, `address_of`, and
what native_tiles.py writes LLVM with. Memory is named by address where calls are many: numba passes
an array as seven arguments. Needs numba; imported only where compiled decoding was asked for.
"""

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
# Without counts of references, which are atomic additions around every slice; and so nothing can
# be allocated.
BARE: dict[str, Any] = {**JIT, "_nrt": False}
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INDEX = ir.IntType(64)
_INT32 = ir.IntType(32)


def index_of(value: int) -> ir.Constant:
    """A constant index."""
    return ir.Constant(INDEX, value)


def vector_at(builder: ir.IRBuilder, address: Any, offset: Any) -> Any:
    """Where the 16 floats from element `offset` on are."""
    first = builder.inttoptr(address, FLOAT.as_pointer())
    place = builder.gep(first, [offset], source_etype=FLOAT)
    return builder.bitcast(place, VECTOR.as_pointer())


def load_vector(builder: ir.IRBuilder, place: ir.Value) -> ir.Value:
    """Sixteen floats that need not be aligned."""
    return builder.load(place, align=4, typ=VECTOR)


def shuffled(builder: ir.IRBuilder, vector: ir.Value, lanes: list[int]) -> Any:
    """The vector with its lanes in another order."""
    order = ir.Constant(ir.VectorType(_INT32, LANES), lanes)
    return builder.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), order)


def spread(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A vector of one number."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    lone = builder.insert_element(nothing, value, ir.Constant(_INT32, 0))
    return shuffled(builder, lone, [0] * LANES)


def vector_function(builder: ir.IRBuilder, name: str, operands: int) -> ir.Function:
    """One of LLVM's own functions of vectors."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * operands)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")


def _rotate_pairs(typing_context, x, divisor, scale, rotation, width):
    """Divides `width` floats, multiplies them by `scale`, then rotates each pair (even, odd) by the
    (cosine, sine) of `rotation`, in place.
    """
    index = types.int64

    def generate(context, builder, signature, arguments):
        address, divisor, scale_at, rotation_at, count = arguments
        fused = vector_function(builder, "fma", 3)
        fence = vector_function(builder, "arithmetic.fence", 1)
        divisors = spread(builder, divisor)
        even = [lane // 2 * 2 for lane in range(LANES)]
        signs = ir.Constant(VECTOR, [-1.0, 1.0] * (LANES // 2))
        with cgutils.for_range(builder, builder.sdiv(count, index_of(LANES))) as loop:
            offset = builder.mul(loop.index, index_of(LANES))
            place = vector_at(builder, address, offset)
            scales = load_vector(builder, vector_at(builder, scale_at, offset))
            angles = load_vector(builder, vector_at(builder, rotation_at, offset))
            # LLVM may reorder products; the fence keeps the quotient and its rounding.
            quotients = builder.fdiv(load_vector(builder, place), divisors)
            numbers = builder.fmul(builder.call(fence, [quotients]), scales)
            crossed = shuffled(builder, numbers, [lane ^ 1 for lane in range(LANES)])
            cosines = shuffled(builder, angles, even)
            sines = shuffled(builder, angles, [lane + 1 for lane in even])
            crossed = builder.fmul(builder.fmul(crossed, sines), signs)
            builder.store(builder.call(fused, [numbers, cosines, crossed]), place, align=4)
        return context.get_dummy_value()

    return types.void(index, types.float32, index, index, index), generate


def _largest_of_vectors(typing_context, address, vectors):
    """The largest float of whole vectors, of which there is at least one."""

    def generate(context, builder, signature, arguments):
        address, count = arguments
        largest = cgutils.alloca_once(builder, VECTOR)
        builder.store(load_vector(builder, vector_at(builder, address, index_of(0))), largest)

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        with cgutils.for_range(builder, count) as loop:
            offset = builder.mul(loop.index, index_of(LANES))
            new = load_vector(builder, vector_at(builder, address, offset))
            builder.store(larger(new, builder.load(largest, typ=VECTOR)), largest)
        found = builder.load(largest, typ=VECTOR)
        for distance in (8, 4, 2, 1):
            moved = shuffled(builder, found, [lane ^ distance for lane in range(LANES)])
            found = larger(moved, found)
        return builder.extract_element(found, ir.Constant(_INT32, 0))

    return types.float32(types.int64, types.int64), generate


def _address_of(typing_context, array, at):
    """The address of an element of a float32 array."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]], source_etype=FLOAT), INDEX)

    return types.int64(array, types.int64), generate


def _float_of_bits(typing_context, bits):
    """The float32 whose bits are an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), generate


def _bits_of_float(typing_context, value):
    """The bits of a float32 as an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), generate


address_of: Any = intrinsic(_address_of)
float_of_bits: Any = intrinsic(_float_of_bits)
bits_of_float: Any = intrinsic(_bits_of_float)
rotate_pairs: Any = intrinsic(_rotate_pairs)
_largest: Any = intrinsic(_largest_of_vectors)


@numba.njit(**BARE)
def largest_of(values):
    """The largest of a slice; of a plain loop LLVM makes no vectors."""
    vectors = len(values) // LANES
    largest = _largest(address_of(values, 0), vectors) if vectors else values[0]
    for at in range(len(values) - LANES * vectors):
        value = values[LANES * vectors + at]
        largest = value if value > largest else largest
    return largest
