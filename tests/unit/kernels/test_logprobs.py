"""The log-probability kernel equals log-softmax, forward and backward."""

import pytest
import torch

from ostinato.kernels.logprobs.op import token_logprobs
from ostinato.kernels.logprobs.reference import token_logprobs_reference


@pytest.mark.parametrize("num_rows", [1, 64, 515])
def test_token_logprobs_equal_reference(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(33, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 33, (num_rows,), generator=generator)
    direction = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    expected, expected_entropy = token_logprobs_reference(hidden, head, targets)
    logprobs, entropy = token_logprobs(hidden, head, targets, with_entropy=True)
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=1e-12)
    grads = torch.autograd.grad(logprobs, (hidden, head), direction)
    wanted = torch.autograd.grad(expected, (hidden, head), direction)
    torch.testing.assert_close(grads, wanted, atol=1e-12, rtol=1e-12)


def test_token_logprobs_passes_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 6, 0])
    torch.autograd.gradcheck(lambda *leaves: token_logprobs(*leaves, targets)[0], (hidden, head))
