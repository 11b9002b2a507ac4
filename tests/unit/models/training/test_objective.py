"""Losses and estimators."""

import torch

from ostinato.models.training.objective import distillation_kl, k3_nats


def test_distillation_kl_equals_torch_and_passes_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(5, 7, generator=generator, dtype=torch.float64), -1)
    expected = torch.nn.functional.kl_div(
        draft.log_softmax(-1), teacher, log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(distillation_kl(draft, teacher), expected)
    torch.autograd.gradcheck(lambda logits: distillation_kl(logits, teacher), (draft,))


def test_the_estimator_averages_to_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    sampled, other = torch.log_softmax(
        torch.randn(2, 6, generator=generator, dtype=torch.float64), -1
    )
    exact = (sampled.exp() * (sampled - other)).sum()
    torch.testing.assert_close((sampled.exp() * k3_nats(sampled, other)).sum(), exact)
    assert (k3_nats(sampled, other) >= 0).all()
