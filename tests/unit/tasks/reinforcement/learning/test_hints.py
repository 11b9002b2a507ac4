"""Distillation from a hint: its gradient is that of the divergence, whatever the layout."""

import numpy as np
import pytest
import torch

from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.tasks.records import Hint, Sample
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    PolicyOptimizerConfig,
)
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.step import PolicyLearner
from tests.fakes.logits import forward_logits
from tests.unit.tasks.reinforcement.learning.samples import TINY, make_sample, random_samples

# so that the divergence, some 1e-3 nats of a random model, weighs as much as the policy gradient
COEFFICIENT = 200.0
OBJECTIVE = ObjectiveConfig(loss_divisor_tokens=64, hint_coefficient=COEFFICIENT)
PACKING = PackingConfig(bucket_tokens=(8, 16, 48), microbatch_tokens=96)


def hinted_samples() -> list[Sample]:
    """Turns of several lengths, each with two or three more tokens before it in the hinted context."""
    model = build_trainer_model(TINY, seed=3)
    samples = []
    for index, sample in enumerate(random_samples(model, 7, seed=5)):
        tokens = sample.segment.token_ids_T.tolist()
        last = len(tokens)
        start = max(1, last - 3)
        told = [*tokens[: start - 1], *[7 + index, 9, 11][: 2 + index % 2], tokens[start - 1]]
        hint = Hint(turn_start=start, turn_end=last, context_tokens=tuple(told))
        samples.append(sample.model_copy(update={"hint": hint}))
    return [*samples, *random_samples(model, 2, seed=6)]


def step(
    model: TrainerModel,
    samples: list[Sample],
    objective: ObjectiveConfig = OBJECTIVE,
    packing: PackingConfig = PACKING,
) -> StepReport:
    config = LearningConfig(
        objective=objective,
        packing=packing,
        optimizer=PolicyOptimizerConfig(gradient_clip_norm=None),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return PolicyLearner(model, optimizer, config).step(samples, step=1, weight_version=0)


def divergence(model: TrainerModel, sample: Sample) -> torch.Tensor:
    """KL(policy || policy after the hint) over the turn, from plain logits."""
    hint = sample.hint
    assert hint is not None
    turn = sample.segment.token_ids_T[hint.turn_start : hint.turn_end].tolist()
    tokens = sample.segment.token_ids_T[: hint.turn_end].tolist()

    def last_rows(ids: list[int]) -> torch.Tensor:
        logits_TV = forward_logits(model, torch.tensor([ids]))[0]
        return torch.log_softmax(logits_TV[-len(turn) - 1 : -1], -1)

    with torch.no_grad():
        teacher = last_rows([*hint.context_tokens, *turn])
    student = last_rows(tokens)
    return torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="sum")


@pytest.mark.parametrize(
    "packing",
    [PACKING, PackingConfig(bucket_tokens=(48,), microbatch_tokens=1)],
)
def test_gradient_is_that_of_the_divergence_beside_the_policy_gradient(
    packing: PackingConfig,
) -> None:
    samples = hinted_samples()
    model = build_trainer_model(TINY, seed=3)
    before = [weight.detach().clone() for weight in model.parameters()]
    report = step(model, samples, packing=packing)
    seen = [old - new for old, new in zip(before, model.parameters(), strict=True)]

    plain = build_trainer_model(TINY, seed=3)
    step(plain, samples, OBJECTIVE.model_copy(update={"hint_coefficient": 0.0}), packing)
    policy = [old - new for old, new in zip(before, plain.parameters(), strict=True)]
    wanted_model = build_trainer_model(TINY, seed=3)
    hinted = [sample for sample in samples if sample.hint is not None]
    total = torch.stack([divergence(wanted_model, sample) for sample in hinted]).sum()
    (COEFFICIENT * total / 64).backward()
    added = 0.0
    for found, base, weight in zip(seen, policy, wanted_model.parameters(), strict=True):
        gradient = torch.zeros_like(base) if weight.grad is None else weight.grad
        added = max(added, float(gradient.abs().max()))
        # a difference of weights of size 1 keeps some 1e-7 of the gradient
        largest = float((base + gradient).abs().max())
        assert float((found - base - gradient).abs().max()) < 1e-6 + 1e-4 * largest
    assert added > 0.02
    tokens = sum(s.hint.turn_end - s.hint.turn_start for s in hinted if s.hint is not None)
    assert report.hinted_samples == len(hinted)
    assert report.hint_kl_nats == pytest.approx(float(total) / tokens, rel=1e-4)


def test_a_context_that_fits_no_row_is_left_out() -> None:
    [sample] = [make_sample(0, [1, 2, 3, 4], [False, True, True, True], advantage=0.0)]
    hint = Hint(turn_start=2, turn_end=4, context_tokens=tuple(np.ones(47, dtype=int).tolist()))
    report = step(build_trainer_model(TINY, seed=3), [sample.model_copy(update={"hint": hint})])
    assert (report.hinted_samples, report.hint_kl_nats, report.is_updated) == (0, None, False)
