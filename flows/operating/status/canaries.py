"""Rows of open canaries: share and interactions of each arm, the looks of the guard, what it waits for."""

import contextlib
import time
from collections.abc import Iterator

from ostinato.flows.operating.status.ledger import sqlite_file
from ostinato.flows.operating.status.rows import StatusRow
from ostinato.flows.operating.status.services import GATEWAY, RunningUp
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.realtime.promotion.config import GuardConfig
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from ostinato.tasks.realtime.promotion.standing import CanaryStanding, TestStanding, standing_of


def open_canaries(settings: Settings, up: RunningUp, now: float) -> list[CanaryStanding]:
    """Those of all lines in the ledger, tested as the recipe of the running `ostinato up` says."""
    path = sqlite_file(settings)
    if path is not None and not path.exists():
        return []
    guard, found = _guard_of(up), []
    with contextlib.closing(open_ledger(settings)) as ledger:
        for name in ledger.promotions.lines():
            line = ServingLine(ledger, name, time.time)
            canary = line.canary()
            if canary is not None:
                found.append(standing_of(line, canary, guard, now))
    return found


def canary_rows(settings: Settings, up: RunningUp, now: float) -> Iterator[StatusRow]:
    """A row per open canary."""
    for one in open_canaries(settings, up, now):
        arms = ", ".join(
            f"{name} {arm.checkpoint} {arm.share:.0%} of sessions, {arm.interactions} interactions"
            for name, arm in (("control", one.control), ("candidate", one.candidate))
        )
        yield StatusRow(
            part=f"canary of {one.line}",
            state="open",
            since=one.since,
            waits_for=_waits_for(one, now, is_served=up.service(GATEWAY) is not None),
            progress=arms if one.test is None else f"{arms}; {_said(one.test)}",
        )


def _guard_of(up: RunningUp) -> GuardConfig | None:
    if up.state is None or not up.is_alive:
        return None
    try:
        canary = up.state.recipe.load().cycle.canary
    except ConfigError:  # its file has changed since
        return None
    return None if canary is None else canary.guard


def _waits_for(one: CanaryStanding, now: float, *, is_served: bool) -> str:
    test = one.test
    if test is None:
        where = "is another recipe's" if is_served else "runs elsewhere or not at all"
        return f"the gateway of the line, which {where}"
    arms = {"control": one.control, "candidate": one.candidate}
    if test.next_look_sessions is not None:
        seen = ", ".join(f"{name} {arm.sessions}" for name, arm in arms.items())
        wanted = f"{test.next_look_sessions} settled sessions of each arm, {seen} so far"
        if test.next_look_judged_sessions:
            judged = ", ".join(f"{name} {arm.judged_sessions}" for name, arm in arms.items())
            wanted += (
                f"; {test.next_look_judged_sessions} of each arm with an edit kept or reverted, "
                f"{judged} so far"
            )
        return f"{wanted}; withdrawn without them on {_told(test.withdrawn_from)}"
    return f"its age, {max(0.0, test.promoted_from - now) / 60:.0f} min more"


def _said(test: TestStanding) -> str:
    told = f"{test.looks_done} of {test.looks} looks done"
    return (
        f"{told}{test.said and ', ' + test.said}; not promoted before {_told(test.promoted_from)}"
    )


def _told(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
