"""Settings of promotion: how much traffic a canary gets and when users count as worse off."""

from pydantic import Field

from ostinato.infra.platform.record import Record

TEST_LINE = "tests"  # users never get it unless they ask for it by name


class GuardConfig(Record):
    """Conditions on which the online guard withdraws a candidate."""

    minimum_interactions: int = Field(
        default=20,
        ge=1,
        description="interactions each arm needs before the guard says anything but wait",
    )
    significance: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description=(
            "chance of rolling back a candidate that is as good, over all measures together (Holm)"
        ),
    )
    latency_growth: float = Field(
        default=1.25, ge=1, description="a rise of the median below this factor never counts"
    )
