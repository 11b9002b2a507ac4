"""The loss against its formula, term by term."""

import pytest
import torch

from ostinato.tasks.reinforcement.learning.config import ClipBand, ObjectiveConfig
from ostinato.tasks.reinforcement.learning.objective import entropy_bonus, policy_loss

ROLLOUT = torch.tensor([-1.0, -1.0, -1.0, -1.0])
TRAINER = torch.tensor([-1.0, -0.5, -1.5, -0.5])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])


def gradient(config: ObjectiveConfig) -> list[float]:
    logprobs = TRAINER.clone().requires_grad_()
    policy_loss(logprobs, ROLLOUT, ADVANTAGES, config).total.backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


def test_policy_loss_plain_gradient_is_minus_advantage_over_the_constant() -> None:
    assert gradient(ObjectiveConfig(loss_divisor_tokens=4)) == [-0.25, -0.25, 0.25, 0.25]


def test_policy_loss_importance_weight_is_the_ratio_up_to_the_cap() -> None:
    seen = gradient(ObjectiveConfig(loss_divisor_tokens=1, importance_cap=1.2))
    assert seen == pytest.approx([-1.0, -1.2, 0.6065, 1.2], abs=1e-4)


def test_policy_loss_clip_band_stops_only_tokens_that_move_further_out() -> None:
    config = ObjectiveConfig(
        loss_divisor_tokens=1, clip_band=ClipBand(low_ratio=0.8, high_ratio=1.25)
    )
    assert gradient(config) == [-1.0, 0.0, 0.0, 1.0]


def test_policy_loss_extreme_ratio_stays_finite() -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    config = ObjectiveConfig(importance_cap=5.0)
    loss = policy_loss(logprobs, torch.tensor([-1e4]), torch.tensor([1.0]), config)
    assert loss.importance_weights_N.tolist() == [5.0]


def test_entropy_bonus_is_the_gradient_of_the_entropy_on_average() -> None:
    logits_V = torch.tensor([1.5, 0.2, -0.7, 0.0], requires_grad=True)
    logprobs_V = torch.log_softmax(logits_V, -1)
    entropy = -(logprobs_V.exp() * logprobs_V).sum()
    [wanted_V] = torch.autograd.grad(entropy, logits_V, retain_graph=True)
    # each token as often as the policy draws it
    bonus_V = entropy_bonus(logprobs_V, entropy.detach().expand(4), coefficient=0.5)
    weights_V = bonus_V * logprobs_V.exp().detach()
    [seen_V] = torch.autograd.grad((weights_V * logprobs_V).sum(), logits_V)
    assert torch.allclose(seen_V, 0.5 * wanted_V, atol=1e-6)
