"""The normalisation kernel equals its formula, forward and backward."""

import pytest
import torch

from ostinato.kernels.rms_norm.op import rms_norm
from ostinato.kernels.rms_norm.reference import rms_norm_reference


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 4, 6)])
def test_rms_norm_equals_reference_and_passes_gradcheck(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        rms_norm(hidden, weight, 1e-3), rms_norm_reference(hidden, weight, 1e-3)
    )
    torch.autograd.gradcheck(lambda *leaves: rms_norm(*leaves, 1e-3), (hidden, weight))


def test_rms_norm_takes_states_that_are_not_contiguous() -> None:
    hidden = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    weight = torch.ones(6, requires_grad=True)
    torch.testing.assert_close(
        rms_norm(hidden, weight, 1e-6), rms_norm_reference(hidden, weight, 1e-6)
    )
    rms_norm(hidden, weight, 1e-6).sum().backward()
