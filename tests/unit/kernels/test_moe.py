"""The expert kernel equals its formula, forward and backward."""

import pytest
import torch
from torch import Tensor

from ostinato.kernels.moe.op import expert_mlp
from ostinato.kernels.moe.reference import expert_mlp_reference


def draw_inputs(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    scores = torch.rand(num_tokens, num_experts, generator=generator)
    experts_NK = scores.topk(top_k).indices
    return (
        normal(num_tokens, 6),
        experts_NK,
        normal(num_tokens, top_k),
        normal(num_experts, 8, 6),
        normal(num_experts, 6, 4),
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(5, 3, 2), (130, 4, 1), (70, 16, 3)]
)
def test_expert_mlp_equals_reference(num_tokens: int, num_experts: int, top_k: int) -> None:
    inputs = draw_inputs(num_tokens, num_experts, top_k)
    output, expected = expert_mlp(*inputs), expert_mlp_reference(*inputs)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    direction = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    grads = torch.autograd.grad(output, leaves, direction)
    wanted = torch.autograd.grad(expected, leaves, direction)
    torch.testing.assert_close(grads, wanted, atol=1e-12, rtol=1e-12)


def test_expert_mlp_passes_gradcheck() -> None:
    tokens, experts, weights, gate_up, down = draw_inputs(4, 3, 2)
    torch.autograd.gradcheck(
        lambda *leaves: expert_mlp(leaves[0], experts, *leaves[1:]),
        (tokens, weights, gate_up, down),
    )


def test_expert_mlp_expert_without_tokens_has_zero_gradient() -> None:
    tokens, _, weights, gate_up, down = draw_inputs(4, 3, 2)
    experts = torch.tensor([[0, 1]] * 4)
    expert_mlp(tokens, experts, weights, gate_up, down).sum().backward()
    assert gate_up.grad is not None
    assert down.grad is not None
    assert not gate_up.grad[2].any()
    assert not down.grad[2].any()
    assert gate_up.grad[:2].any()
    assert down.grad[:2].any()
