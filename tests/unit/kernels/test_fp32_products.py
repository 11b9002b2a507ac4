"""fp32 products on the CPU are fp32, whichever library multiplies."""

from collections.abc import Iterator

import pytest
import torch

from ostinato.kernels.fp32_products import choose_fp32_products

# relative, of sums of up to 1,536 terms; bf16 operands miss by 4e-3, TF32's by 5e-4
FP32_ERROR = 1e-5
SHAPES = [(64, 64, 64), (128, 576, 1536), (128, 576, 192), (512, 256, 1024), (2048, 128, 49)]


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def error_of(product: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((product.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_every_kind_have_the_error_of_fp32(shape: tuple[int, int, int]) -> None:
    """Plain, transposed either way as in backward passes, and batched."""
    choose_fp32_products()
    rows, width, columns = shape
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, width, generator=generator)
    right = torch.randn(width, columns, generator=generator)
    wanted = left.double() @ right.double()
    turned = right.T.contiguous().T
    assert error_of(left @ right, wanted) < FP32_ERROR
    assert error_of(left @ turned, wanted) < FP32_ERROR
    assert error_of(left.T.contiguous().T @ right, wanted) < FP32_ERROR
    assert error_of(torch.bmm(left[None], right[None])[0], wanted) < FP32_ERROR


def test_cpus_that_multiply_tiles_of_bf16_keep_torchs_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not choose_fp32_products()
    assert torch.get_float32_matmul_precision() == "highest"
