"""Settings of promotion: whose users get what, how much traffic a canary gets and when users count as worse off."""

import math
from typing import Self

from pydantic import Field, model_validator

from ostinato.infra.platform.record import Record

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
    """share of the sessions that the candidate answers"""
    guard: GuardConfig = GuardConfig()
