"""Settings of one real-time cycle."""

import math
from typing import Literal, Self

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

MEASURES = 8  # measures of the guard, any of which can show that users are worse off
TEST_LINE = "tests"  # line that is served only when it is requested by name


class ServingConfig(Record):
    """Serving line of the recipe's checkpoints. A recipe does not inherit it with `extends`."""

    line: str | None = Field(default=None, pattern=r"^[a-z0-9_-]+$")
    """serving line that serves checkpoints that pass the gate; None: none are served"""
    promote_evaluated: bool = False
    """start the line's gate automatically for a checkpoint that passes the gate of a checkpoint-evaluation
    and that the line has never served. The event checkpoint.gate.passed starts the deployment
    promotion/offer-to-users. A cycle promotes its own checkpoints regardless of this setting"""


class GuardConfig(Record):
    """Conditions on which the online guard withdraws or promotes a candidate."""

    minimum_sessions: int = Field(default=20, ge=1)
    """sessions that each arm needs before the first look"""
    looks: int = Field(default=5, ge=1, le=12)
    """number of comparisons of the arms, at minimum_sessions and at each doubling of it; a candidate
    that is not worse at the last look is promoted"""
    minimum_judged_sessions: int = Field(default=20, ge=1)
    """sessions with an edit kept or reverted that each arm also needs before the last look, and so before
    a promotion; with as many reports of surviving edits in one arm, the other needs them too"""
    minimum_seconds: float = Field(default=3_600.0, ge=0)
    """age of a canary before which it is not promoted"""
    maximum_seconds: float = Field(default=604_800.0, gt=0)
    """age at which a canary is withdrawn if too few sessions or judgements have left it undecided; the
    champion stays"""
    settle_seconds: float = Field(default=600.0, ge=0)
    """age from which an interaction counts; later feedback on it counts at later looks"""
    significance: float = Field(default=0.05, gt=0, lt=0.5)
    """probability of withdrawing a candidate that is equally good, over all looks and measures (each look
    gets an equal part, Holm's correction within a look)"""
    latency_growth: float = Field(default=1.25, ge=1)
    """factor of the median latency below which a rise never counts"""
    token_growth: float = Field(default=1.25, ge=1)
    """factor of the median number of generated tokens below which a rise never counts"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.maximum_seconds <= self.minimum_seconds:
            raise ValueError(
                f"maximum_seconds is {self.maximum_seconds:g}, wanted more than minimum_seconds, "
                f"which is {self.minimum_seconds:g}"
            )
        wanted, judged = self.significance / self.looks / MEASURES, self.minimum_judged_sessions
        # Fisher's p if one arm keeps every edit and the other reverts every edit
        if 1 / math.comb(2 * judged, judged) > wanted:
            raise ValueError(
                f"minimum_judged_sessions is {judged}, with which even a candidate that every user "
                f"reverts is not shown to be worse at p <= {wanted:.2g}; wanted more"
            )
        return self


class CanaryConfig(Record):
    """A/B test between gate and promotion."""

    share: float = Field(default=0.2, gt=0, le=0.5)
    """share of the sessions that the candidate answers (0..1)"""
    guard: GuardConfig = GuardConfig()


class SignalWeights(Record):
    """Reward of each signal. The sum of an interaction's terms is clipped to -1..1."""

    edit_kept: float = Field(default=0.75, description="the user kept the edit")
    edit_reverted: float = Field(default=-0.75, description="the user undid the edit")
    edit_survived: float = 0.25
    """factor on (2 * share - 1), with the share of the agent's lines that still exist later"""
    dissatisfied_follow_up: float = Field(default=-0.5, description="the user had to ask again")
    abandoned: float = Field(default=-0.5, description="the user left before looking at the answer")
    thumbs_up: float = Field(default=0.25, description="the user gave a thumb up")
    thumbs_down: float = Field(default=-0.25, description="the user gave a thumb down")
    latency: float = -0.2
    """largest penalty, for answers that took twice the target or longer"""
    broken_calls: float = -0.5
    """factor on the share of tool calls that were broken"""
    no_edit: float = -0.5
    """the answer made no edit although one was requested: a refusal or a needless question"""
    unfinished: float = -0.25
    """the answer reached a turn, token, time or call limit"""
    no_feedback: float = 0.0
    """the user gave no feedback; 0: neither good nor bad. The interaction stays in the batch, is compared
    with the baseline, and gets the terms that depend on the answer alone"""


class DistilConfig(Record):
    """Weights of the signals in the reward."""

    weights: SignalWeights = SignalWeights()
    latency_target_seconds: PositiveFloat = Field(
        default=30.0, description="latency up to which there is no penalty"
    )
    kinds_without_edits: frozenset[str] = frozenset({"chat"})
    """problem kinds that need no edit"""


class BaselineConfig(Record):
    """The expected reward per (population, problem kind), which replaces the group mean."""

    decay: Share = 0.5
    """factor on the counts of earlier cycles when a cycle closes, because the policy has changed since"""


class FeedbackConfig(Record):
    """Settings of collect and distil."""

    distil: DistilConfig = DistilConfig()
    baseline: BaselineConfig = BaselineConfig()
    settle_seconds: NonNegativeFloat = 0.0
    """age below which an interaction waits for the next cycle, so that feedback can arrive"""
    minimum_interactions: PositiveInt = 1
    """interactions that a cycle waits for, because the reward is noisy and needs large batches"""


class SimulatedUsersConfig(Record):
    """Seeded program in place of people. Reports never show its numbers as those of people."""

    users: PositiveInt = Field(default=4, description="concurrent users")
    requests_per_user: PositiveInt = 8
    """problems that each user brings, one after another"""
    seed: int = Field(default=0, description="seed of every choice of the users")
    judgement_error_rate: float = Field(default=0.05, ge=0, le=0.5)
    """probability that a user misreads the tests and keeps a bad edit or reverts a good one (0..1)"""
    abandon_probability: Share = 0.05
    """probability that a user leaves without looking at the answer"""
    patience_seconds: PositiveFloat = 120.0
    """latency of an answer above which a user leaves"""
    follow_up_probability: Share = Field(
        default=0.5, description="probability that an unhappy user asks again"
    )
    maximum_follow_ups: NonNegativeInt = 1
    """most follow-up requests about one problem; 0: none"""
    thumbs_probability: Share = Field(
        default=0.3, description="probability of a thumb, up from happy and down from unhappy users"
    )
    survival_probability: Share = 0.3
    """probability that a kept edit is checked later: still there if the tests really pass, else removed"""


class CycleConfig(Record):
    """One real-time cycle."""

    deadline_seconds: PositiveFloat | None = 14_400.0
    """time from a cycle's opening to the decision of its gate. A late cycle trains only on the newest
    interactions, and its gate is the same; None: no limit"""
    gate_seconds: NonNegativeFloat = 3_600.0
    """part of deadline_seconds that is reserved for the evaluation of the candidate"""
    feedback: FeedbackConfig = FeedbackConfig()
    gate: GateConfig = GateConfig()
    learning: LearningConfig = LearningConfig()
    canary: CanaryConfig | Literal[False] | None = None
    """A/B test of a candidate that passed the gate: it first answers a share of the sessions, and the
    behaviour of these users promotes or withdraws it; false: the gate promotes; None: a canary with the defaults,
    unless the recipe has simulated users, of whom a canary takes no account"""
    simulated_users: SimulatedUsersConfig | None = None
    """seeded program in place of people; None: real traffic only"""

    @property
    def people_canary(self) -> CanaryConfig | None:
        """The canary of candidates for people. None: the gate promotes."""
        if self.canary is None:
            return None if self.simulated_users else CanaryConfig()
        return self.canary or None

    def train_until(self, opened_at: float) -> float | None:
        """Time at which the training of a cycle has to end, on the clock of `opened_at`. None: no limit."""
        if self.deadline_seconds is None:
            return None
        return opened_at + self.deadline_seconds - self.gate_seconds

    @model_validator(mode="after")
    def _time_to_train(self) -> Self:
        if self.deadline_seconds is not None and self.gate_seconds >= self.deadline_seconds:
            raise ValueError(
                f"gate_seconds is {self.gate_seconds}, wanted less than deadline_seconds, "
                f"{self.deadline_seconds}: the difference is the time for training"
            )
        return self

    @model_validator(mode="after")
    def _no_comparison_within_groups(self) -> Self:
        objective, plain = self.learning.objective, ObjectiveConfig()
        for name in ("credit", "advantages", "divide_by_deviation", "divide_by_length"):
            if getattr(objective, name) != getattr(plain, name):
                raise ValueError(
                    f"cycle.learning.objective.{name} is {getattr(objective, name)!r}, wanted "
                    f"{getattr(plain, name)!r}: users' interactions belong to no groups"
                )
        return self
