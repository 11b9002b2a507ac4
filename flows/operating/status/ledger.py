"""Rows of the ledger and of its champions, open cycles and canaries."""

import contextlib
import fcntl
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds, first_line
from ostinato.flows.operating.status.services import GATEWAY, UpProcess
from ostinato.infra.platform.artifacts import Artifacts
from ostinato.infra.platform.errors import ConfigError, OstinatoError, StorageError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.canary_status import (
    CanaryStatus,
    SequentialTestStatus,
    canary_status,
)
from ostinato.tasks.realtime.promotion.serving_line import ServingLine

_WRITE_LOCK_BYTE = 120  # offset in the -shm file of SQLite with a write-ahead log (walformat)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def ledger_rows(
    settings: Settings, thresholds: Thresholds, idle_seconds: Callable[[CycleRow], float | None]
) -> Iterator[StatusRow]:
    """Rows of the ledger, then of open cycles. `idle_seconds`: time for which a cycle was idle; None: unknown."""
    path = sqlite_file(settings)
    if path is not None and not path.exists():
        yield StatusRow(part="ledger", state="not made yet")
        return
    refused = None if path is None else _refused(path, thresholds.lock)
    if refused is not None:
        yield refused
        return
    try:
        with contextlib.closing(open_ledger(settings)) as ledger:
            lines = ledger.promotions.lines()
            yield StatusRow(part="ledger", state="up")
            for line in lines:
                cycle = ledger.cycles.open_cycle(line)
                if cycle is not None:
                    yield _cycle_row(cycle, idle_seconds(cycle), thresholds)
    except OstinatoError as error:
        yield unusable_ledger(first_line(error))


def champion_rows(settings: Settings) -> Iterator[StatusRow]:
    """A row per line with the checkpoint it serves, and whether all files of the checkpoint are in the store."""
    path = sqlite_file(settings)
    if path is not None and not path.exists():
        return
    with contextlib.closing(open_ledger(settings)) as ledger:
        objects = open_object_store(settings)
        artifacts = Artifacts(objects, ledger)
        for line in ledger.promotions.lines():
            champion = ledger.promotions.current(line)
            if champion is None:
                continue
            row = StatusRow(
                part=f"champion of {line}",
                state="serves",
                since=champion.at,
                progress=champion.checkpoint_id,
            )
            cause = _lost_files(artifacts, champion.checkpoint_id)
            lost = row.changed(state="lost", fault=Fault.LOST_CHECKPOINT, cause=cause)
            yield lost if cause else row


def _lost_files(artifacts: Artifacts, checkpoint: str) -> str:
    """The first missing file of a checkpoint, and the remedy. Empty when nothing is missing."""
    remedy = "`ostinato cycle roll-back` serves the previous champion"
    try:
        damaged = artifacts.find_damage(artifacts.get(checkpoint))
    except (ConfigError, StorageError) as error:
        return f"{checkpoint} is missing or damaged in the store: {first_line(error)}; {remedy}"
    if not damaged:
        return ""
    return f"{damaged[0]} of {checkpoint} is missing or damaged in the store; {remedy}"


def _cycle_row(cycle: CycleRow, idle_seconds: float | None, thresholds: Thresholds) -> StatusRow:
    row = StatusRow(
        part=f"cycle {cycle.cycle_id}",
        state="open",
        since=cycle.opened_at,
        progress=", ".join(cycle.stages),
    )
    if idle_seconds is None or idle_seconds < thresholds.cycle:
        return row
    cause = (
        f"idle for {idle_seconds:.0f} s; the next run of realtime-cycle continues it, "
        "`ostinato cycle skip` ends it"
    )
    waits_for = "a run of realtime-cycle"
    return row.changed(waits_for=waits_for, fault=Fault.FORGOTTEN_CYCLE, cause=cause)


def sqlite_file(settings: Settings) -> Path | None:
    """The database file, which status never creates. None when the ledger is on a server."""
    scheme, _, rest = settings.ledger_url.get_secret_value().partition(":///")
    return Path(rest.partition("?")[0]) if scheme == "sqlite" else None


def _refused(path: Path, wait_seconds: float) -> StatusRow | None:
    """The row that says why a SQLite file cannot be written now. None when it can."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=wait_seconds)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            return unusable_ledger(f"{path}: {error}")
        cause = f"{_lock_holder(path)} holds its lock for more than {wait_seconds:g} s"
        return StatusRow(
            part="ledger",
            state="locked",
            waits_for="its lock",
            fault=Fault.HELD_LOCK,
            cause=f"{cause}: end it if it hangs",
        )
    except sqlite3.DatabaseError as error:
        return unusable_ledger(f"{path}: {error}")
    return None


def _lock_holder(path: Path) -> str:
    """The process that holds a SQLite file's write lock, according to the kernel."""
    index = path.with_name(f"{path.name}-shm")
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _WRITE_LOCK_BYTE, 1, 0)
    with contextlib.suppress(OSError), index.open("rb") as file:
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, wanted))
        if kind != fcntl.F_UNLCK and pid > 0:
            return f"process {pid}"
    return "another process"


def unusable_ledger(cause: str) -> StatusRow:
    """Row of a ledger that cannot be used."""
    return StatusRow(part="ledger", state="failing", fault=Fault.UNUSABLE_LEDGER, cause=cause)


def open_canaries(settings: Settings, up: UpProcess, now: float) -> list[CanaryStatus]:
    """Open canaries of all lines in the ledger, tested with the guard of the running `ostinato up`'s recipe."""
    path = sqlite_file(settings)
    if path is not None and not path.exists():
        return []
    guard, found = _guard_of(up), []
    with contextlib.closing(open_ledger(settings)) as ledger:
        for name in ledger.promotions.lines():
            line = ServingLine(ledger, name, time.time)
            canary = line.canary()
            if canary is not None:
                found.append(canary_status(line, canary, guard, now))
    return found


def canary_rows(settings: Settings, up: UpProcess, now: float) -> Iterator[StatusRow]:
    """A row per open canary: share and interactions of each arm, looks of the guard, and the wait."""
    for canary in open_canaries(settings, up, now):
        arms = ", ".join(
            f"{name} {arm.checkpoint} {arm.share:.0%} of sessions, {arm.interactions} interactions"
            for name, arm in (("control", canary.control), ("candidate", canary.candidate))
        )
        yield StatusRow(
            part=f"canary of {canary.line}",
            state="open",
            since=canary.since,
            waits_for=_waits_for(canary, now, is_served=up.service(GATEWAY) is not None),
            progress=arms if canary.test is None else f"{arms}; {_describe_test(canary.test)}",
        )


def describe_canary(ledger: Ledger, name: str, guard: GuardConfig | None) -> str:
    """Sentence about a line's open canary, else about the newest that the guard ended. Empty: there was none."""
    line = ServingLine(ledger, name, time.time)
    canary, end = line.canary(), line.last_end()
    if canary is not None:
        test = canary_status(line, canary, guard, time.time()).test
        state = "" if test is None else f": {_describe_test(test)}"
        return f"canary of {canary.checkpoint_id} since {_minute(canary.started_at)}{state}"
    if end is None:
        return ""
    return f"canary of {end.checkpoint_id} ended: {end.advice.replace('_', ' ')}, {end.reason}"


def _guard_of(up: UpProcess) -> GuardConfig | None:
    if up.state is None or not up.is_alive:
        return None
    try:
        canary = up.state.recipe.load().cycle.people_canary
    except ConfigError:  # the recipe's file has changed since
        return None
    return None if canary is None else canary.guard


def _waits_for(canary: CanaryStatus, now: float, *, is_served: bool) -> str:
    test = canary.test
    if test is None:
        where = "runs another recipe" if is_served else "runs elsewhere or not at all"
        return f"the gateway of the line, which {where}"
    arms = {"control": canary.control, "candidate": canary.candidate}
    if test.next_look_sessions is not None:
        seen = ", ".join(f"{name} {arm.sessions}" for name, arm in arms.items())
        wanted = f"{test.next_look_sessions} settled sessions of each arm, {seen} so far"
        if test.next_look_judged_sessions:
            judged = ", ".join(f"{name} {arm.judged_sessions}" for name, arm in arms.items())
            wanted += (
                f"; {test.next_look_judged_sessions} of each arm with an edit kept or reverted, "
                f"{judged} so far"
            )
        return f"{wanted}; withdrawn without them on {_minute(test.withdrawn_from)}"
    return f"its age, {max(0.0, test.promoted_from - now) / 60:.0f} min more"


def _describe_test(test: SequentialTestStatus) -> str:
    result = f", {test.last_verdict}" if test.last_verdict else ""
    promoted_from = _minute(test.promoted_from)
    return (
        f"{test.looks_done} of {test.looks} looks done{result}; not promoted before {promoted_from}; "
        f"the last look shows a fall from 50 % to {max(0.0, 50 - 100 * test.detectable_difference):.0f} % of all "
        "sessions with probability 0.8"
    )


def _minute(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
