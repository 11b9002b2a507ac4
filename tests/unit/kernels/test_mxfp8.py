"""MXFP8: the scale formula, every special value, and the fast paths bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.mxfp8.formats import (
    FP8,
    FP8_MAX,
    MxTensor,
    inverse_power_of_scale,
    power_of_scale,
)
from ostinato.kernels.mxfp8.op import (
    decode_fp8,
    dequantize,
    fake_quantize,
    quantize,
    quantize_row_col,
    transpose,
)
from ostinato.kernels.mxfp8.reference import (
    dequantize_reference,
    quantize_reference,
    round_to_fp8,
    scale_bytes_reference,
)

BLOCKS = [(1, 32), (32, 1), (1, 128), (128, 1), (128, 128), (32, 32)]
FINITE_CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def draw(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Values whose rows and columns differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def every_finite_bfloat16() -> Tensor:
    return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_rceil_is_the_smallest_power_of_two_that_keeps_every_maximum_in_range() -> None:
    amax = every_finite_bfloat16().double()
    scale = torch.exp2(scale_bytes_reference(amax.float()).double() - 127)
    assert (amax <= FP8_MAX * scale).all()
    could_be_smaller = scale > 2.0**-127
    assert (amax > FP8_MAX * scale / 2)[could_be_smaller].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_block_that_is_not_finite_becomes_nan_and_leaves_its_neighbours(value: float) -> None:
    matrix = torch.ones(2, 64, dtype=torch.bfloat16)
    matrix[1, 40] = value
    mx = quantize(matrix, (1, 32))
    assert mx.scales.tolist() == [[119, 119], [119, 255]]
    assert mx.values.view(torch.uint8)[1, 32:].eq(0x7F).all()
    assert dequantize(mx)[1, 32:].isnan().all()
    assert torch.equal(dequantize(mx)[0], matrix[0])


def test_zeros_keep_their_sign_and_get_the_smallest_scale() -> None:
    matrix = torch.zeros(1, 32, dtype=torch.bfloat16)
    matrix[0, 7] = -0.0
    mx = quantize(matrix, (1, 32))
    assert mx.scales.tolist() == [[0]]
    assert mx.values.view(torch.uint8)[0].tolist() == [0x80 if i == 7 else 0 for i in range(32)]
    assert same_bits(dequantize(mx), matrix)


def test_powers_of_scale_bytes_are_exact_at_both_ends() -> None:
    scales = torch.arange(255, dtype=torch.uint8)
    exponent = torch.arange(255).double() - 127
    assert torch.equal(power_of_scale(scales).double(), torch.exp2(exponent))
    assert torch.equal(inverse_power_of_scale(scales).double(), torch.exp2(-exponent))
    assert inverse_power_of_scale(torch.tensor([254], dtype=torch.uint8)).item() == 2.0**-127
    nan = torch.tensor([255], dtype=torch.uint8)
    assert power_of_scale(nan).isnan().all()
    assert inverse_power_of_scale(nan).isnan().all()


def test_values_round_to_nearest_even_and_saturate() -> None:
    grid = FINITE_CODES.view(FP8).double()
    codes = FINITE_CODES[grid.sort(stable=True).indices]
    values = codes.view(FP8).double()
    middles = (values[:-1] + values[1:]) / 2
    for offset, expected_index in ((-1e-6, 0), (1e-6, 1)):
        moved = middles + offset * middles.abs().clamp(min=1e-3)
        expected = values[:-1] if expected_index == 0 else values[1:]
        assert torch.equal(round_to_fp8(moved.float()).double(), expected)
    ties = round_to_fp8(middles.float()).view(torch.uint8) & 1
    assert not ties[(middles != 0) & (values[:-1] != values[1:])].any()
    assert round_to_fp8(torch.tensor([1e9, -464.1, 448.0])).double().tolist() == [448, -448, 448]


def test_decoding_by_bits_equals_the_cast_for_every_code() -> None:
    codes = torch.arange(256).to(torch.uint8).view(FP8)
    assert torch.equal(decode_fp8(codes).nan_to_num(9999.0), codes.float().nan_to_num(9999.0))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(128, 256), (3, 128, 128), (70, 100), (1, 1)])
def test_fast_paths_equal_the_reference_bit_by_bit(
    block: tuple[int, int], shape: tuple[int, ...]
) -> None:
    matrix = draw(*shape)
    values, scales = quantize_reference(matrix, block)
    mx = quantize(matrix, block)
    assert same_bits(mx.values, values)
    assert torch.equal(mx.scales, scales)
    numbers = dequantize_reference(values, scales, block)
    assert same_bits(dequantize(mx), numbers)
    assert same_bits(fake_quantize(matrix, block), numbers)


@pytest.mark.parametrize("block", BLOCKS)
def test_emulation_equals_storage_for_special_values(block: tuple[int, int]) -> None:
    """Every finite bf16, signed zeros, fp32 subnormals, infinities, NaN, ties, nothing at all."""
    ties = torch.arange(-480, 481).float() / 2 ** torch.arange(961).remainder(12).float()
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-39, 3e38, 448, 464, 480, -465])
    for values in (every_finite_bfloat16().float(), ties, special):
        matrix = functional.pad(values, (0, -values.numel() % 64)).view(-1, 64)
        matrix = torch.cat([matrix, -matrix, draw(*matrix.shape).float() * 1e-3])
        for poison in (0.0, float("nan"), float("-inf")):
            matrix[0, 3] = poison
            numbers = dequantize_reference(*quantize_reference(matrix, block), block, torch.float32)
            assert same_bits(
                fake_quantize(matrix, block, torch.float32).nan_to_num(7.0),
                numbers.nan_to_num(7.0),
            )
    assert fake_quantize(torch.empty(0, 64), block).shape == (0, 64)


def test_row_and_column_copies_are_those_of_the_matrix_and_its_transpose() -> None:
    matrix = draw(128, 160)
    row, column = quantize_row_col(matrix, 32)
    assert same_bits(row.values, quantize(matrix, (1, 32)).values)
    other = quantize(matrix, (32, 1))
    assert same_bits(column.values, transpose(other).values)
    assert torch.equal(column.scales, transpose(other).scales)
    assert column.block == transpose(other).block == (1, 32)


def test_numbers_are_exact_in_bfloat16() -> None:
    codes = FINITE_CODES.view(FP8)[:, None]
    for byte in range(3, 247):
        scales = torch.full((codes.shape[0], 1), byte, dtype=torch.uint8)
        wide = dequantize_reference(codes, scales, (1, 32), torch.float64)
        assert torch.equal(
            dequantize_reference(codes, scales, (1, 32), torch.bfloat16).double(), wide
        )


@settings(deadline=None, max_examples=60)
@given(st.integers(-100, 100), st.integers(0, 2**31 - 1), st.sampled_from([32, 128]))
def test_rounding_commutes_with_powers_of_two_and_is_idempotent(
    power: int, seed: int, group: int
) -> None:
    matrix = draw(2, 128, seed=seed, spread=0.5).float()
    rounded = fake_quantize(matrix, (1, group), torch.float32)
    scaled = fake_quantize(matrix * 2.0**power, (1, group), torch.float32)
    assert torch.equal(scaled, rounded * 2.0**power)
    assert torch.equal(fake_quantize(rounded, (1, group), torch.float32), rounded)


def test_coarse_blocks_are_valid_fine_blocks() -> None:
    mx = quantize(draw(256, 256), (128, 128))
    scales = mx.scales.repeat_interleave(128, -2).repeat_interleave(4, -1)
    fine = MxTensor(mx.values, scales, (1, 32))
    assert torch.equal(dequantize(fine), dequantize(mx))


def test_scales_along_the_wrong_dimension_are_refused() -> None:
    square = quantize(draw(64, 64), (32, 1))
    with pytest.raises(ValueError, match="wanted blocks along the last dimension"):
        square.check_contracted_along_rows()
    with pytest.raises(ValueError, match=r"wanted \(64, 2\)"):
        MxTensor(square.values, square.scales, (1, 32))
