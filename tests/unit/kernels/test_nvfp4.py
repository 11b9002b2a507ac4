"""NVFP4 with one outer scale a token: its laws, and what breaks without them."""

import torch
from torch import Tensor

from ostinato.kernels.nvfp4.reference import (
    FP4_MAX,
    FP8_MAX,
    MAGNITUDES,
    Nvfp4Tensor,
    dequantize_reference,
    linear_reference,
    quantize_reference,
    round_to_fp4,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(2 * torch.randn(shape[0], 1, generator=generator))
    return torch.randn(*shape, generator=generator) * scale


def quantize_by_tensor(rows_MK: Tensor) -> Nvfp4Tensor:
    """The same format with one outer scale for all rows: what must not be done."""
    largest = rows_MK.abs().argmax() // rows_MK.shape[1]
    outer = quantize_reference(rows_MK[largest][None]).row_scales_M
    blocks = rows_MK.unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / FP4_MAX / outer).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    divisor = (scales.float() * outer)[..., None]
    values = round_to_fp4(torch.where(divisor == 0, 0.0, blocks / divisor)).view(rows_MK.shape)
    return Nvfp4Tensor(values, scales, outer.expand(rows_MK.shape[0]))


def test_values_round_to_the_nearest_even_code() -> None:
    magnitudes = torch.tensor(MAGNITUDES)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    even_codes = [magnitudes[index + index % 2].item() for index in range(7)]
    assert round_to_fp4(middles).tolist() == even_codes
    assert torch.equal(round_to_fp4(-middles * 1.001), -magnitudes[1:])
    assert torch.equal(round_to_fp4(middles * 0.999), magnitudes[:-1])
    assert round_to_fp4(torch.tensor([100.0, -7.0])).tolist() == [6.0, -6.0]


def test_a_token_alone_and_in_a_batch_gives_the_same_bits() -> None:
    rows, weights = draw(24, 2080), quantize_reference(draw(40, 2080, seed=1))
    together = linear_reference(quantize_reference(rows), weights)
    for index in range(24):
        alone = linear_reference(quantize_reference(rows[index : index + 1]), weights)
        assert torch.equal(alone[0], together[index])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear_reference(quantize_reference(rows[order]), weights), together[order])


def test_a_token_does_not_depend_on_those_after_it() -> None:
    rows = draw(16, 256)
    louder = rows.clone()
    louder[10:] *= 1000
    weights = quantize_reference(draw(32, 256, seed=1))
    before = linear_reference(quantize_reference(rows), weights)
    after = linear_reference(quantize_reference(louder), weights)
    assert torch.equal(before[:10], after[:10])
    assert not torch.equal(before[10:], after[10:])


def test_one_scale_a_tensor_breaks_both_laws() -> None:
    rows = draw(16, 256)
    louder = rows.clone()
    louder[10:] *= 1000
    weights = quantize_reference(draw(32, 256, seed=1))
    together = linear_reference(quantize_by_tensor(rows), weights)
    assert not torch.equal(linear_reference(quantize_by_tensor(rows[:1]), weights)[0], together[0])
    leaked = linear_reference(quantize_by_tensor(louder), weights)
    assert not torch.equal(leaked[:10], together[:10])


def test_a_reciprocal_instead_of_a_division_changes_codes() -> None:
    # ties between two codes that the rounded reciprocal moves off the tie
    divisors = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) + 0.5
    middles = torch.tensor(MAGNITUDES)[:-1] + torch.tensor(MAGNITUDES)[1:]
    numerators = divisors[:, None] * middles / 2
    exact = round_to_fp4(numerators / divisors[:, None])
    fast = round_to_fp4(numerators * (1 / divisors[:, None]))
    assert (exact != fast).any()


def test_row_scale_is_the_rows_own_maximum_by_division() -> None:
    rows = draw(64, 64)
    scales = quantize_reference(rows).row_scales_M
    assert torch.equal(scales, (rows.abs().amax(-1).double() / (FP4_MAX * FP8_MAX)).float())


def test_rows_of_zeros_and_tiny_blocks_stay_finite() -> None:
    rows = torch.zeros(2, 32)
    rows[1, 0], rows[1, 20] = 1e4, 1e-6
    numbers = dequantize_reference(quantize_reference(rows))
    assert not numbers[0].any()
    torch.testing.assert_close(numbers[1, 0], rows[1, 0], rtol=1e-6, atol=0.0)
    assert numbers[1, 1:].eq(0).all()


def test_rounding_error_is_that_of_three_bits() -> None:
    rows = draw(64, 512)
    error = dequantize_reference(quantize_reference(rows)) - rows
    assert 18 < (10 * torch.log10(rows.square().sum() / error.square().sum())).item() < 23
