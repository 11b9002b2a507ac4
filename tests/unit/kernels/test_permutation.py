"""Laying out rows by expert: equal to the loops, adjoint, deterministic."""

import pytest
import torch
from torch import Tensor

from ostinato.kernels.permutation.op import (
    largest_rows,
    permute,
    plan_rows,
    plan_rows_op,
    unpermute,
)
from ostinato.kernels.permutation.reference import (
    permute_reference,
    plan_rows_reference,
    unpermute_reference,
)


def draw_experts(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    # a power makes experts unequally popular; some have no token
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return (scores * torch.linspace(1, 0.3, num_experts)).topk(top_k).indices


@pytest.mark.parametrize("align", [1, 32, 128])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(7, 3, 2), (65, 16, 4), (1, 8, 1)]
)
def test_plan_equals_the_loops(num_tokens: int, num_experts: int, top_k: int, align: int) -> None:
    experts_NK = draw_experts(num_tokens, num_experts, top_k)
    place, source, ends = plan_rows_reference(experts_NK, num_experts, align)
    plan = plan_rows(experts_NK, num_experts, align)
    assert torch.equal(plan.place_NK, place)
    assert torch.equal(plan.source_P, source)
    assert torch.equal(plan.ends_E, ends)
    bound = largest_rows(experts_NK.numel(), num_experts, align)
    assert ends[-1] <= bound
    longer = plan_rows_op(experts_NK, num_experts, align, bound)[1]
    assert torch.equal(longer[: ends[-1]], source)
    assert (longer[ends[-1] :] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_permute_equals_the_loop(dtype: torch.dtype) -> None:
    experts_NK = draw_experts(33, 8, 2)
    tokens_ND = torch.randint(0, 200, (33, 5), generator=torch.Generator().manual_seed(1)).to(dtype)
    plan = plan_rows(experts_NK, 8, 32)
    assert torch.equal(permute(tokens_ND, plan), permute_reference(tokens_ND, plan.source_P))


def test_unpermute_equals_the_loop() -> None:
    experts_NK = draw_experts(33, 8, 3)
    plan = plan_rows(experts_NK, 8, 32)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(plan.source_P.numel(), 6, generator=generator).bfloat16()
    total = unpermute(rows, plan)
    assert total.dtype == torch.float32
    assert torch.equal(total, unpermute_reference(rows, plan.place_NK))


def test_permute_and_unpermute_are_adjoint() -> None:
    plan = plan_rows(draw_experts(20, 4, 2), 4, 32)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    rows = torch.randn(plan.source_P.numel(), 3, generator=generator, dtype=torch.float64)
    left = (permute(tokens, plan) * rows).sum()
    torch.testing.assert_close(left, (tokens * unpermute(rows, plan)).sum(), rtol=1e-12, atol=1e-12)
