"""Status of an open canary: counts of both arms, and looks of the guard."""

from pydantic import Field

from ostinato.infra.platform.ledger.rows import InteractionRow
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.guard import (
    detectable_difference,
    find_mismatch,
    last_look,
)
from ostinato.tasks.realtime.promotion.observations import CANDIDATE, CONTROL, observe, settled
from ostinato.tasks.realtime.promotion.serving_line import Canary, ServingLine
from ostinato.tasks.records import StageRecord


class ArmStatus(StageRecord):
    """One arm of the A/B."""

    checkpoint: str | None
    share: float = Field(description="share of sessions that it answers (0..1)")
    interactions: int
    sessions: int = Field(description="settled sessions, the only ones that the guard counts")
    judged_sessions: int = Field(description="settled sessions with an edit kept or reverted")


class SequentialTestStatus(StageRecord):
    """The sequential test of an A/B."""

    __test__ = False

    looks_done: int
    looks: int
    next_look_sessions: int | None = Field(
        description="settled sessions per arm at the next look; None: all looks are done"
    )
    next_look_judged_sessions: int = Field(
        description="judged sessions per arm that the last look waits for"
    )
    detectable_difference: float = Field(
        description="worsening of a share of sessions, from 0.5, that the last look shows with probability 0.8"
    )
    last_verdict: str = Field(
        description="verdict of the last look, or that sessions are split otherwise than asked; empty before the first"
    )
    promoted_from: float
    """time before which it is not promoted, in seconds since the epoch"""
    withdrawn_from: float
    """time at which it is withdrawn if the last look was not made before, in seconds since the epoch"""


class CanaryStatus(StageRecord):
    """An open A/B of a line."""

    line: str
    since: float = Field(description="seconds since the epoch")
    control: ArmStatus
    candidate: ArmStatus
    test: SequentialTestStatus | None = Field(
        description="None: the recipe with the settings of its guard is unknown"
    )


def canary_status(
    line: ServingLine, canary: Canary, config: GuardConfig | None, now: float
) -> CanaryStatus:
    """Status of a canary. `config`: settings of its guard, None: unknown. Changes nothing."""
    rows = line.interactions_during(canary)
    ready = settled(rows, config or GuardConfig(), now)
    return CanaryStatus(
        line=line.name,
        since=canary.started_at,
        control=_arm(CONTROL, line.champion(), 1 - canary.share, rows, ready),
        candidate=_arm(CANDIDATE, canary.checkpoint_id, canary.share, rows, ready),
        test=None if config is None else _test(canary, config, ready),
    )


def _arm(
    name: str,
    checkpoint: str | None,
    share: float,
    rows: list[InteractionRow],
    ready: list[InteractionRow],
) -> ArmStatus:
    seen = [one for one in observe(ready) if one.arm == name]
    return ArmStatus(
        checkpoint=checkpoint,
        share=share,
        interactions=sum(row.arm == name for row in rows),
        sessions=len({one.session_id for one in seen}),
        judged_sessions=len({one.session_id for one in seen if one.kept is not None}),
    )


def _test(canary: Canary, config: GuardConfig, ready: list[InteractionRow]) -> SequentialTestStatus:
    observations = observe(ready)
    done, report = last_look(observations, config, canary.groups)
    mismatch = find_mismatch(observations, canary.share, canary.groups)
    return SequentialTestStatus(
        looks_done=done,
        looks=config.looks,
        next_look_sessions=config.minimum_sessions << done if done < config.looks else None,
        next_look_judged_sessions=(
            config.minimum_judged_sessions if done == config.looks - 1 else 0
        ),
        detectable_difference=detectable_difference(config),
        last_verdict=mismatch or ("" if report is None else report.reason),
        promoted_from=canary.started_at + config.minimum_seconds,
        withdrawn_from=canary.started_at + config.maximum_seconds,
    )
