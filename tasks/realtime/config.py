"""Settings of one real-time cycle."""

import math
from typing import Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ostinato.infra.platform.record import Record, Share
from ostinato.tasks.evaluation.config import GateConfig
from ostinato.tasks.reinforcement.learning.config import LearningConfig, ObjectiveConfig

MEASURES = 4  # of which any can show that users are worse off
TEST_LINE = "tests"  # users never get it unless they ask for it by name


class ServingConfig(Record):
    """Serving line of what the recipe trains. `extends` never hands it on."""

    line: str | None = Field(default=None, pattern=r"^[a-z0-9_-]+$")
    """serving line whose users get checkpoints that pass the gate; None: nobody"""
    promote_evaluated: bool = False
    """a checkpoint that passes the gate of a checkpoint-evaluation, and that users of the line
    never had, goes before the line's gate by itself: the deployment promotion/manual on the event
    checkpoint.gate.passed. A cycle ships what it trained anyway"""


class GuardConfig(Record):
    """Conditions on which the online guard withdraws or promotes a candidate."""

    minimum_sessions: int = Field(default=20, ge=1)
    """sessions that each arm needs before the first look at it"""
    looks: int = Field(default=5, ge=1, le=12)
    """the arms are compared at minimum_sessions and at each doubling of it; a candidate that is not
    worse at the last look is promoted"""
    minimum_judged_sessions: int = Field(default=20, ge=1)
    """sessions with an edit kept or reverted that each arm needs as well before the last look; without
    them nothing is promoted"""
    minimum_seconds: float = Field(default=3_600.0, ge=0)
    """no promotion before a canary is as old as this"""
    maximum_seconds: float = Field(default=604_800.0, gt=0)
    """a canary of this age that was not decided, since sessions or judgements are too few, is
    withdrawn; the champion stays"""
    settle_seconds: float = Field(default=600.0, ge=0)
    """an interaction counts after this time; what is said about it later counts at later looks"""
    significance: float = Field(default=0.05, gt=0, lt=0.5)
    """chance of withdrawing a candidate that is as good, over all looks and measures together (an
    equal part to each look, Holm within one)"""
    latency_growth: float = Field(default=1.25, ge=1)
    """a rise of the median below this factor never counts"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.maximum_seconds <= self.minimum_seconds:
            raise ValueError(
                f"maximum_seconds is {self.maximum_seconds:g}, wanted more than minimum_seconds, "
                f"which is {self.minimum_seconds:g}"
            )
        wanted, judged = self.significance / self.looks / MEASURES, self.minimum_judged_sessions
        # Fisher's p where one arm keeps every edit and the other reverts every one
        if 1 / math.comb(2 * judged, judged) > wanted:
            raise ValueError(
                f"minimum_judged_sessions is {judged}, with which even a candidate that every user "
                f"reverts is not shown to be worse at p <= {wanted:.2g}; wanted more"
            )
        return self


class CanaryConfig(Record):
    """A/B between gate and promotion."""

    share: float = Field(default=0.2, gt=0, le=0.5)
    """share of the sessions that the candidate answers (0..1)"""
    guard: GuardConfig = GuardConfig()


class SignalWeights(Record):
    """Reward of each signal. Terms add up, and the sum is cut to -1..1."""

    edit_kept: float = Field(default=0.75, description="the user kept the edit")
    edit_reverted: float = Field(default=-0.75, description="the user undid the edit")
    edit_survived: float = 0.25
    """times (2 * share - 1), share of the agent's lines still there after a while"""
    dissatisfied_follow_up: float = Field(default=-0.5, description="the user had to ask again")
    abandoned: float = Field(default=-0.5, description="the user left before looking at the answer")
    thumbs_up: float = Field(default=0.25, description="the user gave a thumb up")
    thumbs_down: float = Field(default=-0.25, description="the user gave a thumb down")
    latency: float = -0.2
    """reached when the answer took twice the target or more"""
    broken_calls: float = -0.5
    """times the share of tool calls that were broken"""
    no_edit: float = -0.5
    """an edit was asked for and none was made: a refusal or a needless question"""
    unfinished: float = -0.25
    """the answer ran into a turn, token, time or call limit"""
    no_feedback: float = 0.0
    """the user said nothing at all. Default 0: neither good nor bad. The interaction stays in the
    batch and is compared with the baseline like any other; terms read off the answer itself still
    apply"""


class DistilConfig(Record):
    """Weights of the signals in the reward."""

    weights: SignalWeights = SignalWeights()
    latency_target_seconds: PositiveFloat = Field(default=30.0, description="no penalty up to here")
    kinds_without_edits: frozenset[str] = frozenset({"chat"})
    """problem kinds where an answer without an edit is fine"""


class BaselineConfig(Record):
    """The expected reward per (population, problem kind). Stands in for the group mean."""

    decay: Share = 0.5
    """weight of earlier cycles' counts when a cycle closes: the policy that earned them is gone"""


class FeedbackConfig(Record):
    """Settings of collect and distil."""

    distil: DistilConfig = DistilConfig()
    baseline: BaselineConfig = BaselineConfig()
    settle_seconds: NonNegativeFloat = 0.0
    """an interaction younger than this waits for the next cycle, so that feedback can arrive"""
    minimum_interactions: PositiveInt = 1
    """a cycle with fewer waits: the reward is noisy and wants large batches"""


class SimulatedUsersConfig(Record):
    """Seeded program in place of people. Its numbers are never shown as users' numbers."""

    users: PositiveInt = Field(default=4, description="users at work at the same time")
    requests_per_user: PositiveInt = 8
    """problems each user brings, one after another"""
    seed: int = Field(default=0, description="seed of every choice they make")
    judgement_error_rate: float = Field(default=0.05, ge=0, le=0.5)
    """chance that a user misreads the tests: keeps a bad edit, reverts a good one (0..1)"""
    abandon_probability: Share = 0.05
    """leaves without looking at the answer"""
    patience_seconds: PositiveFloat = 120.0
    """leaves when the answer takes longer"""
    follow_up_probability: Share = Field(default=0.5, description="an unhappy user asks again")
    maximum_follow_ups: NonNegativeInt = 1
    """times a user asks again about one problem, at most; 0: never"""
    thumbs_probability: Share = Field(default=0.3, description="gives a thumb, up or down, by mood")
    survival_probability: Share = 0.3
    """a kept edit is looked at again later: still there if the tests really pass, else removed"""


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
