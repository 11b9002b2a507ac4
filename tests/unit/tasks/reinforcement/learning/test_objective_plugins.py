"""Advantages and losses of packages: used as the shipped ones are, and checked where they come in."""

import math
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.infra.platform import plugins
from ostinato.infra.platform.errors import GradingError, TrainingError
from ostinato.tasks.realtime.config import CycleConfig
from ostinato.tasks.records import Trajectory
from ostinato.tasks.reinforcement.learning.batches.advantages import group_mean
from ostinato.tasks.reinforcement.learning.batches.credit import samples_of_step
from ostinato.tasks.reinforcement.learning.config import ClipBand, LearningConfig, ObjectiveConfig
from ostinato.tasks.reinforcement.learning.objective import PolicyLoss, named_loss, policy_loss
from tests.unit.tasks.reinforcement.learning.batches.test_advantages import group_of

REWARDS = [1.0, 0.0, 0.5]


def half_mean(attempts: Sequence[Trajectory]) -> list[float]:
    return [advantage / 2 for advantage in group_mean(attempts)]


def doubled(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
) -> PolicyLoss:
    return policy_loss(logprobs_N, rollout_logprobs_N, 2 * advantages_N, config)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a function of this module, or any object, under the name `mine` in both groups."""

    def give(found: Any) -> None:
        monkeypatch.setitem(globals(), "given", found)
        point = EntryPoint("mine", f"{__name__}:given", "")
        monkeypatch.setattr(plugins, "installed_entries", lambda group: {"mine": point})

    return give


def advantages(objective: ObjectiveConfig) -> list[float]:
    return [sample.advantage for sample in samples_of_step([group_of(REWARDS)], objective)]


def test_advantages_are_those_that_the_package_gives(install) -> None:
    install(half_mean)
    assert advantages(ObjectiveConfig(advantages="mine")) == pytest.approx([0.25, -0.25, 0.0])
    install(group_mean)
    assert advantages(ObjectiveConfig(advantages="mine")) == advantages(ObjectiveConfig())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0], "1 numbers, wanted 3"),
        ([], "0 numbers, wanted 3"),
        ([0.0, math.nan, 0.0], "attempt t1 is nan"),
        ([0.0, 0.0, "good"], "attempt t2 is 'good', wanted a number"),
        ([math.inf, 0.0, 0.0], "attempt t0 is inf"),
    ],
)
def test_advantages_of_another_form_are_refused_by_name(install, given, message: str) -> None:
    install(lambda attempts: given)
    with pytest.raises(GradingError, match=rf"advantages 'mine' of .*{message}"):
        advantages(ObjectiveConfig(advantages="mine"))


def test_loss_is_that_of_the_package(install) -> None:
    install(doubled)
    logprobs_N = torch.tensor([-1.0, -0.5], requires_grad=True)
    tokens = (logprobs_N, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]))
    objective = ObjectiveConfig(clip_band=ClipBand())
    plain = named_loss(*tokens, objective)
    own = named_loss(*tokens, objective.model_copy(update={"loss": "mine"}))
    assert own.total.item() == 2 * plain.total.item() != 0


def test_loss_of_another_form_is_refused_by_name(install) -> None:
    """One that is not finite is refused by all ranks (`ranks/test_ranks.py`)."""
    marks_N = torch.zeros(2, dtype=torch.bool)
    tokens = (torch.zeros(2), torch.zeros(2), torch.ones(2))
    install(lambda *_: PolicyLoss(torch.tensor(1.0), torch.ones(3), marks_N))
    with pytest.raises(TrainingError, match=r"loss 'mine' .* shapes \[\(\), \(3,\)"):
        named_loss(*tokens, ObjectiveConfig(loss="mine"))
    install(lambda *_: torch.tensor(1.0))
    with pytest.raises(TrainingError, match="gave Tensor, wanted a PolicyLoss"):
        named_loss(*tokens, ObjectiveConfig(loss="mine"))


def test_settings_of_the_group_mean_do_not_go_with_other_advantages(install) -> None:
    install(half_mean)
    for other in ({"credit": "edit"}, {"divide_by_deviation": True}, {"divide_by_length": True}):
        with pytest.raises(ValueError, match="advantages is 'mine'"):
            ObjectiveConfig(advantages="mine", **other)
    learning = LearningConfig(objective=ObjectiveConfig(advantages="mine"))
    with pytest.raises(ValueError, match="users' interactions belong to no groups"):
        CycleConfig(learning=learning)
