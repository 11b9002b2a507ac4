"""`ostinato status`: states are told apart, and what is wrong is named with its likely cause."""

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ostinato.flows.operating.status_report import StatusRow, collect
from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.cluster.workspace import (
    FAILURE,
    HEARTBEAT,
    PROCESS,
    PROGRESS,
    PUBLISHED,
    RESULT,
    Failure,
    Progress,
)
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings


def here(home: Path, **others: int) -> Settings:
    """Settings whose ports nobody listens on."""
    ports = {"prefect_port": find_free_port(), "gateway_port": find_free_port()}
    return Settings.model_validate({"home": home, "minimum_free_disk_bytes": 0, **ports, **others})


def rows_of(settings: Settings) -> dict[str, StatusRow]:
    """Rows by part; a stage by its directory's name."""
    return {row.part.removeprefix("nano-seed0 "): row for row in collect(settings)}


def stage(home: Path, name: str) -> Path:
    directory = home / "runs" / "nano-seed0" / name
    directory.mkdir(parents=True)
    return directory


def test_finished_stopped_failed_and_never_started_are_told_apart(tmp_path: Path) -> None:
    progress = Progress(done=3, total=7, message="documents", metrics={}, at=5.0)
    (stage(tmp_path, "problems-abc") / RESULT).write_text("{}")
    (stage(tmp_path, "cycle-123") / PUBLISHED).write_text("cycle/nano@1")
    stopped, failed = stage(tmp_path, "corpus-def"), stage(tmp_path, "drafted-ghi")
    stage(tmp_path, "pretrained-jkl")
    gone = mark_process(os.getpid()).model_copy(update={"pid": 2**22})
    (stopped / PROCESS).write_text(gone.model_dump_json())
    (stopped / PROGRESS).write_text(progress.model_dump_json())
    failure = Failure(error_type="StorageError", message="No space left\nlast lines of the log")
    (failed / FAILURE).write_text(failure.model_dump_json())

    rows = rows_of(here(tmp_path))
    assert rows["problems-abc"].state == rows["cycle-123"].state == "finished"
    assert rows["corpus-def"].state == "stopped"
    assert rows["corpus-def"].waits_for == "the same command again"
    assert (rows["corpus-def"].progress, rows["corpus-def"].since) == ("3/7 documents", 5.0)
    assert (rows["drafted-ghi"].state, rows["drafted-ghi"].cause) == ("failed", "No space left")
    assert rows["pretrained-jkl"].state == "not started"


def test_a_stopped_and_a_silent_process_stand_still_and_a_working_one_runs(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [subprocess.Popen(sleeper) for _ in range(3)]
    try:
        for name, process in zip(("a", "b", "c"), processes, strict=True):
            directory = stage(tmp_path, name)
            (directory / PROCESS).write_text(mark_process(process.pid).model_dump_json())
            (directory / HEARTBEAT).touch()
        processes[0].send_signal(signal.SIGSTOP)
        os.waitpid(processes[0].pid, os.WUNTRACED)
        long_ago = time.time() - 100
        os.utime(tmp_path / "runs" / "nano-seed0" / "b" / HEARTBEAT, (long_ago, long_ago))
        rows = rows_of(here(tmp_path))
    finally:
        for process in processes:
            process.kill()
    assert rows["a"].state == rows["b"].state == "stands still"
    assert f"kill -CONT {processes[0].pid}" in rows["a"].cause
    assert "no heartbeat for 1" in rows["b"].cause
    assert (rows["c"].state, rows["c"].cause) == ("running", "")
    assert psutil.pid_exists(processes[2].pid)


def test_a_service_that_listens_and_does_not_answer_is_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        settings = here(tmp_path, gateway_port=mute.getsockname()[1])
        rows = rows_of(settings)
    assert (rows["server"].state, rows["server"].cause) == ("not running", "")
    assert rows["gateway"].state == "silent"
    assert "does not answer" in rows["gateway"].cause


def test_a_held_lock_a_full_disk_and_an_open_cycle_are_named(tmp_path: Path) -> None:
    settings = here(tmp_path, minimum_free_disk_bytes=2**60)
    with contextlib.closing(open_ledger(settings)) as ledger:
        ledger.promotions.promote("mine", "candidate/a@1", None, "first", 1.0)
        ledger.cycles.open(
            "mine-000000-f",
            line="mine",
            served="candidate/a@1",
            from_watermark=0,
            to_watermark=4,
            at=7.0,
        )
    rows = rows_of(settings)
    assert rows["disk"].state == "full"
    assert rows["ledger"].state == rows["store"].state == "up"
    assert (rows["cycle mine-000000-f"].state, rows["cycle mine-000000-f"].since) == ("open", 7.0)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as holder:
        holder.execute("BEGIN IMMEDIATE")
        assert rows_of(settings)["ledger"].state in ("locked", "silent")
