"""Settings of one real-time cycle."""

from typing import Self

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from ostinato.infra.platform.record import Record
from ostinato.tasks.evaluation.config import GateConfig
from ostinato.tasks.realtime.feedback.config import FeedbackConfig, SimulatedUsersConfig
from ostinato.tasks.realtime.promotion.config import CanaryConfig
from ostinato.tasks.reinforcement.learning.config import LearningConfig, ObjectiveConfig


class CycleConfig(Record):
    """One real-time cycle."""

    deadline_seconds: PositiveFloat | None = 14_400.0
    """time from a cycle's opening to its gate's word. A late cycle trains on fewer interactions,
    the newest, and its gate is the same; None: it takes as long as it takes"""
    gate_seconds: NonNegativeFloat = 3_600.0
    """part of these that is left for the evaluation of the candidate"""
    feedback: FeedbackConfig = FeedbackConfig()
    gate: GateConfig = GateConfig()
    learning: LearningConfig = LearningConfig()
    canary: CanaryConfig | None = None
    """a candidate that passed the gate answers a share of the sessions first and is promoted or
    withdrawn by what those users do; None: the gate promotes"""
    simulated_users: SimulatedUsersConfig | None = None
    """a seeded program that stands in for people; None: real traffic only"""

    def train_until(self, opened_at: float) -> float | None:
        """When the training of a cycle has to end, on the clock of `opened_at`. None: whenever."""
        if self.deadline_seconds is None:
            return None
        return opened_at + self.deadline_seconds - self.gate_seconds

    @model_validator(mode="after")
    def _time_to_train(self) -> Self:
        if self.deadline_seconds is not None and self.gate_seconds >= self.deadline_seconds:
            raise ValueError(
                f"gate_seconds is {self.gate_seconds}, wanted less than deadline_seconds, "
                f"{self.deadline_seconds}: the rest is for training"
            )
        return self

    @model_validator(mode="after")
    def _no_comparison_within_groups(self) -> Self:
        objective, plain = self.learning.objective, ObjectiveConfig()
        for name in ("credit", "divide_by_deviation", "divide_by_length"):
            if getattr(objective, name) != getattr(plain, name):
                raise ValueError(
                    f"cycle.learning.objective.{name} is {getattr(objective, name)!r}, wanted "
                    f"{getattr(plain, name)!r}: users' interactions have no group to compare within"
                )
        return self
