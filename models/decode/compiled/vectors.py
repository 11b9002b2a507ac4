"""Operations on vectors of 16 float32 that the compiled loops share, and their compiler options.

numba has no bf16, so a bf16 number is the uint16 of its bits, the upper half of a float32's:
`items_at`, `pointer_at`, `moved` and `as_float` accept both, chosen by type at compilation.
Frequent calls pass memory by address: numba passes an array as seven arguments, and needs 0.15 us
to accept one from Python. A sum of floats is never a plain loop: LLVM may order its terms anew each
time it optimises the function, and the process that compiles a function runs another copy of it
than processes that load it from the cache, so the last bits would differ. Needs numba; imported
only for compiled decoding.
"""

from typing import Any

import numba
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.np.arrayobj import make_array, populate_array

from ostinato.models.decode.supported import LANES

JIT: dict[str, Any] = {
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "nnan"},
}
# Without numba's reference counts, which are atomic additions around every slice. Such functions
# cannot allocate.
BARE: dict[str, Any] = {**JIT, "_nrt": False}
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INDEX = ir.IntType(64)
_INT16, _INT32 = ir.IntType(16), ir.IntType(32)
_ENDLESS = 1 << 40  # items

intrinsic: Any = extending.intrinsic  # untyped, since its result is called with other arguments


def index_of(value: int) -> ir.Constant:
    """A constant index."""
    return ir.Constant(INDEX, value)


def vector_at(builder: ir.IRBuilder, address: Any, offset: Any) -> Any:
    """Address of the 16 floats from element `offset` on."""
    first = builder.inttoptr(address, FLOAT.as_pointer())
    place = builder.gep(first, [offset], source_etype=FLOAT)
    return builder.bitcast(place, VECTOR.as_pointer())


def load_vector(builder: ir.IRBuilder, place: ir.Value) -> ir.Value:
    """Sixteen floats that need not be aligned."""
    return builder.load(place, align=4, typ=VECTOR)


def load_items(builder: ir.IRBuilder, pointer: Any, offset: Any, item: types.Type) -> ir.Value:
    """Sixteen numbers from element `offset` on as floats, exactly."""
    llvm_item, item_bytes = layout_of(item)
    kind = ir.VectorType(llvm_item, LANES)
    place = builder.gep(pointer, [offset], source_etype=llvm_item)
    items = builder.load(builder.bitcast(place, kind.as_pointer()), align=item_bytes, typ=kind)
    if item == types.float32:
        return items
    return _widened(builder, items, ir.VectorType(_INT32, LANES), VECTOR)


def layout_of(item: types.Type) -> tuple[ir.Type, int]:
    """LLVM type of a matrix's item, and its size in bytes."""
    return (FLOAT, 4) if item == types.float32 else (_INT16, 2)


def _widened(builder: ir.IRBuilder, bits: Any, words: ir.Type, floats: ir.Type) -> Any:
    """Floats of bf16: their bits followed by 16 zeros."""
    sixteen = ir.Constant(_INT32, 16)
    if isinstance(words, ir.VectorType):
        sixteen = ir.Constant(words, [16] * words.count)
    return builder.bitcast(builder.shl(builder.zext(bits, words), sixteen), floats)


def shuffled(builder: ir.IRBuilder, vector: Any, lanes: list[int]) -> Any:
    """The vector with its lanes in another order."""
    order = ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def spread(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A vector whose lanes all hold one number."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    single = builder.insert_element(nothing, value, ir.Constant(_INT32, 0))
    return shuffled(builder, single, [0] * LANES)


def _llvm_function(builder: ir.IRBuilder, name: str, kind: Any, arguments: int) -> ir.Function:
    """LLVM's own function of floats or vectors of them."""
    ending = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = ir.FunctionType(kind, [kind] * arguments)
    return cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{ending}")


def fused_multiply_add(builder: ir.IRBuilder, kind: ir.Type = VECTOR) -> ir.Function:
    """LLVM's own function of three vectors or floats, a * b + c rounded once."""
    return _llvm_function(builder, "fma", kind, 3)


@intrinsic
def rotate_pairs(typing_context, x, divisor, scale, rotation, width):
    """Divides `width` floats, multiplies them by `scale`, then rotates each pair (even, odd) by the
    (cosine, sine) of `rotation`, in place.
    """
    index = types.int64

    def generate(context, builder, signature, arguments):
        address, divisor, scale_at, rotation_at, count = arguments
        fused = fused_multiply_add(builder)
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
            numbers = builder.fmul(_fenced(builder, quotients), scales)
            crossed = shuffled(builder, numbers, [lane ^ 1 for lane in range(LANES)])
            cosines = shuffled(builder, angles, even)
            sines = shuffled(builder, angles, [lane + 1 for lane in even])
            crossed = builder.fmul(builder.fmul(crossed, sines), signs)
            builder.store(builder.call(fused, [numbers, cosines, crossed]), place, align=4)
        return context.get_dummy_value()

    return types.void(index, types.float32, index, index, index), generate


@intrinsic
def _largest(typing_context, address, vectors):
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


def _fenced(builder: ir.IRBuilder, value: Any) -> Any:
    """The value, rounded. LLVM reorders no operation across the fence."""
    return builder.call(_llvm_function(builder, "arithmetic.fence", value.type, 1), [value])


def _folded(builder: ir.IRBuilder, vector: Any) -> Any:
    """The sum of all lanes, halving the vector until one lane is left."""
    lanes = vector.type.count
    distance = lanes // 2
    while distance:
        other = shuffled(builder, vector, [lane ^ distance for lane in range(lanes)])
        vector = _fenced(builder, builder.fadd(vector, other))
        distance //= 2
    return builder.extract_element(vector, ir.Constant(_INT32, 0))


def _write_sum(
    builder: ir.IRBuilder, address: Any, count: Any, *, is_squared: bool, is_paired: bool
) -> Any:
    """The sum of floats or of their squares. Four vectors at a time are summed, added as pairs or
    one after another, and folded; then come eight floats at a time, then single floats.
    """
    eight, sums = ir.VectorType(FLOAT, 8), [cgutils.alloca_once(builder, VECTOR) for _ in range(4)]
    total, eights = cgutils.alloca_once(builder, FLOAT), cgutils.alloca_once(builder, eight)
    floats = builder.inttoptr(address, FLOAT.as_pointer())

    def add_from(place: Any, kind: ir.Type, to: Any) -> None:
        pointer = builder.bitcast(
            builder.gep(floats, [place], source_etype=FLOAT), kind.as_pointer()
        )
        new, old = builder.load(pointer, align=4, typ=kind), builder.load(to, typ=kind)
        if not is_squared:
            builder.store(builder.fadd(old, new), to)
            return
        builder.store(builder.call(fused_multiply_add(builder, kind), [new, new, old]), to)

    for part in sums:
        builder.store(ir.Constant(VECTOR, [0.0] * LANES), part)
    blocks = builder.sdiv(count, index_of(4 * LANES))
    with cgutils.for_range(builder, blocks) as loop:
        first = builder.mul(loop.index, index_of(4 * LANES))
        for part in range(4):
            add_from(builder.add(first, index_of(LANES * part)), VECTOR, sums[part])
    left, more, right, most = (builder.load(part, typ=VECTOR) for part in sums)
    both = _fenced(builder, builder.fadd(left, more))
    if is_paired:
        right = _fenced(builder, builder.fadd(right, most))
        both = _fenced(builder, builder.fadd(both, right))
    else:
        both = _fenced(builder, builder.fadd(both, right))
        both = _fenced(builder, builder.fadd(both, most))
    builder.store(_folded(builder, both), total)
    done = builder.mul(blocks, index_of(4 * LANES))
    some = builder.sdiv(builder.sub(count, done), index_of(8))
    with builder.if_then(builder.icmp_signed(">", some, index_of(0))):
        start = builder.insert_element(
            ir.Constant(eight, [0.0] * 8), builder.load(total, typ=FLOAT), ir.Constant(_INT32, 0)
        )
        builder.store(start, eights)
        with cgutils.for_range(builder, some) as loop:
            add_from(builder.add(done, builder.mul(loop.index, index_of(8))), eight, eights)
        builder.store(_folded(builder, builder.load(eights, typ=eight)), total)
    done = builder.add(done, builder.mul(some, index_of(8)))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        add_from(builder.add(done, loop.index), FLOAT, total)
    return _fenced(builder, builder.load(total, typ=FLOAT))


def _sum_of(*, is_squared: bool, is_paired: bool = True) -> Any:
    @intrinsic
    def sum_of(typing_context, address, count):
        """The sum of floats at an address, or of their squares."""

        def generate(context, builder, signature, arguments):
            return _write_sum(builder, *arguments, is_squared=is_squared, is_paired=is_paired)

        return types.float32(types.int64, types.int64), generate

    return sum_of


@intrinsic
def address_of(typing_context, array, at):
    """The address of an element of a float32 array."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]], source_etype=FLOAT), INDEX)

    return types.int64(array, types.int64), generate


def _write_array(context: Any, builder: ir.IRBuilder, kind: types.Array, address: Any) -> Any:
    """The array that begins at an address, without a known end and without reference counts."""
    data_kind = context.get_data_type(kind.dtype)
    item_bytes = index_of(context.get_abi_sizeof(data_kind))
    array = make_array(kind)(context, builder)
    populate_array(
        array,
        data=builder.inttoptr(address, data_kind.as_pointer()),
        shape=cgutils.pack_array(builder, [index_of(_ENDLESS)]),
        strides=cgutils.pack_array(builder, [item_bytes]),
        itemsize=item_bytes,
        meminfo=None,
    )
    return array._getvalue()


def _array_at(element: types.Type) -> Any:
    kind = types.Array(element, 1, "C")

    @intrinsic
    def array_at(typing_context, address):
        """The array that begins at an address."""

        def generate(context, builder, signature, arguments):
            return _write_array(context, builder, kind, arguments[0])

        return kind(types.int64), generate

    return array_at


@intrinsic
def items_at(typing_context, address, like):
    """The array that begins at an address, with the item type of `like`."""
    kind = types.Array(like.dtype, 1, "C")

    def generate(context, builder, signature, arguments):
        return _write_array(context, builder, kind, arguments[0])

    return kind(types.int64, like), generate


@intrinsic
def pointer_at(typing_context, array, at):
    """A typed pointer to an element of an array."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        item = context.get_data_type(signature.args[0].dtype)
        return builder.gep(data, [arguments[1]], source_etype=item)

    return types.CPointer(array.dtype)(array, types.int64), generate


@intrinsic
def moved(typing_context, pointer, items):
    """The pointer advanced by `items`."""

    def generate(context, builder, signature, arguments):
        item = context.get_data_type(signature.args[0].dtype)
        return builder.gep(arguments[0], [arguments[1]], source_etype=item)

    return pointer(pointer, types.int64), generate


@intrinsic
def as_float(typing_context, item):
    """A number of an array as float32, exactly."""

    def generate(context, builder, signature, arguments):
        if signature.args[0] == types.float32:
            return arguments[0]
        return _widened(builder, arguments[0], _INT32, FLOAT)

    return types.float32(item), generate


@intrinsic
def float_of_bits(typing_context, bits):
    """The float32 whose bits are an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(typing_context, value):
    """The bits of a float32 as an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), generate


floats_at, integers_at = _array_at(types.float32), _array_at(types.int64)
sum_at = _sum_of(is_squared=False)
# Not paired: keeps the summation order, and so the last bits, of log-probabilities of older runs.
mass_at = _sum_of(is_squared=False, is_paired=False)
squares_at = _sum_of(is_squared=True)


@numba.njit(**BARE)
def largest_of(values):
    """The largest number of a slice. LLVM would not vectorise a plain loop."""
    vectors = len(values) // LANES
    largest = _largest(address_of(values, 0), vectors) if vectors else values[0]
    for at in range(len(values) - LANES * vectors):
        value = values[LANES * vectors + at]
        largest = value if value > largest else largest
    return largest
