"""Triton's interpreter with exact casts and products, so that kernels are checked bit by bit.

`install`, to be called before a kernel runs. The interpreter rounds to fp8 without carrying
into the exponent, truncates to bf16 and misreads bf16 products; these two replacements go through
torch. A test fails when Triton moves what they replace.
"""

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

TORCH_TYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
CONTAINERS = {
    1: (np.uint8, torch.uint8),
    2: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    8: (np.int64, torch.int64),
}
SATURATING = (tl.float8e4nv, tl.float8e5)
REPLACED = ("_convert_float",)
_convert_as_shipped = interpreter._convert_float


def to_torch(bits: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    """The interpreter's bits as torch numbers."""
    container, _ = CONTAINERS[dtype.primitive_bitwidth // 8]
    return torch.from_numpy(np.ascontiguousarray(bits).view(container)).view(TORCH_TYPES[dtype])


def convert_float(bits, source, target, rounding_mode):
    """Rounds to nearest even; fp8 saturates as the GPU's instruction does, and has one NaN."""
    if source not in TORCH_TYPES or target not in TORCH_TYPES:
        return _convert_as_shipped(bits, source, target, rounding_mode)
    numbers = to_torch(bits, source)
    if target in SATURATING:
        limit = torch.finfo(TORCH_TYPES[target]).max
        numbers = numbers.float().clamp(-limit, limit)
        numbers = torch.where(numbers.isnan(), float("nan"), numbers)
    rounded = numbers.to(TORCH_TYPES[target])
    width = target.primitive_bitwidth
    _, container = CONTAINERS[width // 8]
    return rounded.view(container).numpy().view(getattr(np, f"uint{width}")).reshape(np.shape(bits))


def create_dot(self, left, right, total, input_precision, max_num_imprecise_acc):
    """A product of the operands' numbers in fp32."""

    def wide(handle):
        if handle.dtype.is_floating():
            return to_torch(handle.data, handle.dtype.scalar).float().numpy()
        return handle.data

    product = np.matmul(wide(left), wide(right)) + total.data
    return interpreter.TensorHandle(product.astype(total.data.dtype), total.dtype.scalar)


def install() -> None:
    """Puts the replacements in."""
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
