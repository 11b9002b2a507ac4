"""Settings of promotion: whose users get what, how much traffic a canary gets and when users count as worse off."""

from pydantic import Field

from ostinato.infra.platform.record import Record

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
    minimum_seconds: float = Field(default=3_600.0, ge=0)
    """no promotion before a canary is as old as this"""
    settle_seconds: float = Field(default=600.0, ge=0)
    """an interaction counts after this time, with what was said about it until then"""
    significance: float = Field(default=0.05, gt=0, lt=0.5)
    """chance of withdrawing a candidate that is as good, over all looks and measures together (an
    equal part to each look, Holm within one)"""
    latency_growth: float = Field(default=1.25, ge=1)
    """a rise of the median below this factor never counts"""


class CanaryConfig(Record):
    """A/B between gate and promotion."""

    share: float = Field(default=0.2, gt=0, le=0.5)
    """of the sessions that the candidate answers"""
    guard: GuardConfig = GuardConfig()
