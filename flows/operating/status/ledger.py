"""Rows of the ledger, and of what stands in it: champions and open cycles."""

import contextlib
import fcntl
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds, first_line
from ostinato.infra.platform.artifacts import Artifacts
from ostinato.infra.platform.errors import ConfigError, OstinatoError, StorageError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings

_WRITE_LOCK_BYTE = 120  # of the index beside a SQLite file with a write-ahead log (walformat)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def ledger_rows(
    settings: Settings, thresholds: Thresholds, idle_seconds: Callable[[CycleRow], float | None]
) -> Iterator[StatusRow]:
    """The ledger, then open cycles. `idle_seconds`: how long nobody worked on one, where that is known."""
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
    """The checkpoint that serves each line, with all its files in the store."""
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
            lost = {"state": "lost", "fault": Fault.LOST_CHECKPOINT, "cause": cause}
            yield row.model_copy(update=lost) if cause else row


def _lost_files(artifacts: Artifacts, checkpoint: str) -> str:
    """What of a checkpoint is not there. Empty when nothing is missing."""
    remedy = "`ostinato cycle roll-back` serves the one before it"
    try:
        damaged = artifacts.find_damage(artifacts.get(checkpoint))
    except (ConfigError, StorageError) as error:
        return f"{checkpoint} is not in the store as it was: {first_line(error)}; {remedy}"
    if not damaged:
        return ""
    return f"{damaged[0]} of {checkpoint} is not in the store as it was; {remedy}"


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
        f"nobody works on it since {idle_seconds:.0f} s; the next run of realtime-cycle goes on, "
        "`ostinato cycle skip` ends it"
    )
    return row.model_copy(
        update={
            "waits_for": "a run of realtime-cycle",
            "fault": Fault.FORGOTTEN_CYCLE,
            "cause": cause,
        }
    )


def sqlite_file(settings: Settings) -> Path | None:
    """The database file, which nothing here makes. None when the ledger is on a server."""
    parts = urlsplit(settings.ledger_url.get_secret_value())
    return Path(parts.path.removeprefix("/")) if parts.scheme == "sqlite" else None


def _refused(path: Path, wait_seconds: float) -> StatusRow | None:
    """Why a SQLite file cannot be written now. None when it can."""
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
            cause=f"{cause}: end it if it does not go on",
        )
    except sqlite3.DatabaseError as error:
        return unusable_ledger(f"{path}: {error}")
    return None


def _lock_holder(path: Path) -> str:
    """The process that has a SQLite file's write lock, as the kernel tells it."""
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
