"""Settings of feedback: what each user signal is worth, how baselines shrink, how simulated users
behave.
"""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ostinato.infra.platform.record import Record, Share


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
    """how often a user misreads the tests: keeps a bad edit, reverts a good one"""
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
