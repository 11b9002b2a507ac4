"""What the weight chain's laws are tested over: tensors of any bits, and any share of them changed."""

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SHAPES = ((), (0,), (1,), (7,), (3, 0), (4, 5), (2, 3, 5), (400,), (70_000,))
DENSITIES = (0.0, 0.001, 0.01, 0.2, 0.6, 0.9, 1.0)


def random_bits(generator: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]):
    """A tensor of any bits at all, NaN payloads, infinities and signed zeros included."""
    elements = int(np.prod(shape))
    if elements == 0:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, elements).astype(bool)).reshape(shape)
    item_bytes = torch.empty((), dtype=dtype).element_size()
    raw = torch.from_numpy(generator.integers(0, 256, elements * item_bytes, dtype=np.uint8))
    return raw.view(dtype).reshape(shape)


def changed(tensor: torch.Tensor, generator: np.random.Generator, density: float):
    """A copy with about `density` of its elements replaced by other bits."""
    other = random_bits(generator, tensor.dtype, tuple(tensor.shape))
    pick = (
        torch.rand(
            tensor.shape, generator=torch.Generator().manual_seed(int(generator.integers(2**31)))
        )
        < density
    )
    if tensor.dtype.itemsize > 1:
        return torch.where(pick, other, tensor)
    bits = torch.where(pick, other.view(torch.uint8), tensor.view(torch.uint8))
    return bits.view(tensor.dtype)  # 8-bit floats know no where


layouts = st.dictionaries(
    st.sampled_from(["embed", "layer.0", "layer.0::full", "layer.0::gaps", "norm"]),
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
    min_size=1,
    max_size=4,
)
seeds = st.integers(0, 2**32 - 1)
density_lists = st.lists(st.sampled_from(DENSITIES), min_size=1, max_size=6)


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors agree in names, dtypes, shapes and every bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and _bytes(left[name]) == _bytes(right[name])
        for name in left
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
