"""Rows of `ostinato status`: states are told apart, and no wait that has its reason is a finding."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.operating.status.report import collect, in_a_sentence, print_rows
from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds
from ostinato.flows.operating.up import UP_FILE, ServiceState, UpState
from ostinato.infra.platform.cluster.child import note_ending
from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.cluster.ranks import mark_rank
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.cluster.stage_status import (
    BlockedOn,
    BoxUse,
    ReplicaStatus,
    StageStatus,
)
from ostinato.infra.platform.cluster.workspace import (
    FAILURE,
    PROCESS,
    PROGRESS,
    PUBLISHED,
    RESULT,
    Failure,
    ProcessMark,
    Progress,
    replace_text,
)
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings
from tests.fakes.open_canary import open_canary
from tests.fakes.sleeping_stage import sleeping_stage

AT_ONCE = Thresholds(progress=0.0)


def here(home: Path) -> Settings:
    """Settings whose ports nobody listens on."""
    ports = {"prefect_port": find_free_port(), "gateway_port": find_free_port()}
    return Settings.model_validate({"home": home, "minimum_free_disk_bytes": 0, **ports})


def rows_of(home: Path, thresholds: Thresholds | None = None) -> dict[str, StatusRow]:
    """Rows by part; those of a stage without the name of its run."""
    rows = collect(here(home), thresholds)
    return {row.part.removeprefix("nano-seed0 "): row for row in rows}


def stage(home: Path, name: str) -> Path:
    directory = home / "runs" / "nano-seed0" / name
    directory.mkdir(parents=True)
    return directory


def gone() -> ProcessMark:
    """A process that is not there."""
    return mark_process(os.getpid()).model_copy(update={"pid": 2**22})


@contextmanager
def sleeping_run(home: Path, status: StageStatus | None = None) -> Iterator[Path]:
    """A stage whose process sleeps, with a heartbeat, and progress and a status of now."""
    directory = stage(home, "stage-012")
    progress = Progress(done=1, total=2, message="", at=time.time() - 0.01)
    replace_text(directory / PROGRESS, progress.model_dump_json())
    with sleeping_stage(directory, status):
        yield directory


def waiting_run(what: str, at: float) -> StageStatus:
    """An RL run whose trainer waits, or takes a step."""
    wait = BlockedOn(what=what, detail="-", since=at - 1.0)
    return StageStatus(phase="running", at=at, waits={"trainer": wait})


def test_ends_of_stages_are_told_apart(tmp_path: Path) -> None:
    progress = Progress(done=3, total=7, message="documents", metrics={}, at=5.0)
    (stage(tmp_path, "problems-abc") / RESULT).write_text("{}")
    (stage(tmp_path, "cycle-123") / PUBLISHED).write_text("cycle/nano@1")
    killed, failed = stage(tmp_path, "corpus-def"), stage(tmp_path, "drafted-ghi")
    asked, stalled = stage(tmp_path, "search-mno"), stage(tmp_path, "traffic-pqr")
    stage(tmp_path, "pretrained-jkl")
    stage(tmp_path, "pretrained-jkl.superseded-0123")
    for directory in (killed, asked, stalled):
        (directory / PROCESS).write_text(gone().model_dump_json())
    (killed / PROGRESS).write_text(progress.model_dump_json())
    failure = Failure(error_type="StorageError", message="No space left\nlast lines of the log")
    (failed / FAILURE).write_text(failure.model_dump_json())
    note_ending(asked, "KeyboardInterrupt")
    note_ending(stalled, "ClusterError no heartbeat", is_error=True)

    rows = rows_of(tmp_path)
    assert rows["problems-abc"].state == rows["cycle-123"].state == "finished"
    row = rows["corpus-def"]
    assert (row.state, row.fault, row.since) == ("killed", Fault.KILLED_STAGE, 5.0)
    assert (row.waits_for, row.progress) == ("the same command again", "3/7 documents")
    assert (rows["drafted-ghi"].state, rows["drafted-ghi"].cause) == ("failed", "No space left")
    assert (rows["search-mno"].state, rows["search-mno"].fault) == ("interrupted", None)
    assert rows["traffic-pqr"].fault is Fault.FAILED_STAGE
    assert (rows["pretrained-jkl"].state, rows["pretrained-jkl"].fault) == ("not started", None)
    assert not any("superseded" in part for part in rows)


def test_a_stage_of_another_host_is_left_to_it(tmp_path: Path) -> None:
    away = gone().model_copy(update={"host": "elsewhere"})
    (stage(tmp_path, "a") / PROCESS).write_text(away.model_dump_json())
    row = rows_of(tmp_path)["a"]
    assert (row.state, row.fault) == ("on host elsewhere", None)


def test_a_trainer_that_waits_for_rollouts_is_not_stalled(tmp_path: Path) -> None:
    with sleeping_run(tmp_path, waiting_run("ready groups", time.time())):
        rows = rows_of(tmp_path, AT_ONCE)
    assert (rows["stage-012"].state, rows["stage-012"].fault) == ("running", None)
    assert rows["stage-012 trainer"].waits_for == "ready groups (-)"


def test_a_step_in_which_nothing_is_computed_is_stalled_since_its_begin(tmp_path: Path) -> None:
    at = time.time()
    with sleeping_run(tmp_path, waiting_run("step 4", at)):
        row = rows_of(tmp_path, AT_ONCE)["stage-012"]
    assert (row.fault, row.since) == (Fault.STALLED_STAGE, at - 1.0)


def test_a_status_that_is_not_replaced_means_a_blocked_loop(tmp_path: Path) -> None:
    at = time.time() - 100
    with sleeping_run(tmp_path, waiting_run("ready groups", at)):
        row = rows_of(tmp_path)["stage-012"]
    assert (row.fault, row.since) == (Fault.STALLED_STAGE, at)
    assert "event loop" in row.cause


def test_a_stage_that_computes_is_not_stalled(tmp_path: Path) -> None:
    with sleeping_run(tmp_path) as directory:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            replace_text(directory / PROCESS, mark_process(busy.pid).model_dump_json())
            row = rows_of(tmp_path, AT_ONCE)["stage-012"]
        finally:
            busy.kill()
            busy.wait()
    assert (row.state, row.fault) == ("running", None)


def test_ranks_of_an_earlier_attempt_are_not_missed(tmp_path: Path) -> None:
    mark_rank(tmp_path / "earlier", 0)
    with sleeping_run(tmp_path) as directory:
        (directory / "steps").mkdir()
        (tmp_path / "earlier" / "ranks").rename(directory / "steps" / "ranks")
        assert not any("rank" in part for part in rows_of(tmp_path))


def test_a_killed_up_and_a_gateway_without_a_checkpoint(tmp_path: Path) -> None:
    own = mark_process(os.getpid())
    gateway = ServiceState(name="gateway", process=own, since=7.0)
    running = UpState(process=own, recipe=RecipeChoice(name="nano"), since=3.0, services=(gateway,))
    replace_text(tmp_path / UP_FILE, running.model_dump_json())
    rows = rows_of(tmp_path)
    assert (rows["up"].state, rows["up"].since) == ("up", 3.0)
    assert (rows["gateway"].state, rows["gateway"].since) == ("waiting", 7.0)
    assert "checkpoint" in rows["gateway"].waits_for

    killed = running.model_copy(update={"process": gone()})
    replace_text(tmp_path / UP_FILE, killed.model_dump_json())
    rows = rows_of(tmp_path)
    assert rows["up"].fault is Fault.DEAD_SERVICE
    assert rows["gateway"].state == "not running"


def test_an_open_canary_is_told_with_its_arms_and_what_it_waits_for(tmp_path: Path) -> None:
    open_canary(here(tmp_path), sessions=120, age_seconds=3_000, users=("ann", "bob"))
    told = rows_of(tmp_path)["canary of toy"]
    assert told.state == "open"
    assert told.fault is None
    assert told.since == pytest.approx(time.time() - 3_000, abs=60)
    assert "control candidate/toy@1 75% of sessions, 90 interactions" in told.progress
    assert "candidate candidate/toy@2 25% of sessions, 30 interactions" in told.progress
    assert told.waits_for == "the gateway of the line, which runs elsewhere or not at all"

    recipe = RecipeChoice(name="nano", overrides=("cycle.canary.guard.minimum_sessions=20",))
    state = UpState(process=mark_process(os.getpid()), recipe=recipe, since=1.0)
    replace_text(tmp_path / UP_FILE, state.model_dump_json())
    told = rows_of(tmp_path)["canary of toy"]
    wanted = "40 settled sessions of each arm, control 90, candidate 30 so far; withdrawn without"
    assert told.waits_for.startswith(wanted)
    assert "1 of 5 looks done, not worse: " in told.progress
    assert "users are compared with users who behaved alike before the canary" in told.progress
    assert "not promoted before" in told.progress
    assert "shows a fall from 50 % to 35 % of all sessions with probability 0.8" in told.progress


def test_a_lock_is_told_with_its_holder(tmp_path: Path) -> None:
    open_ledger(here(tmp_path)).close()
    hold = (
        "import sqlite3, sys, time; held = sqlite3.connect(sys.argv[1]); "
        "held.execute('BEGIN IMMEDIATE'); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "ledger.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        row = rows_of(tmp_path, Thresholds(lock=0.2))["ledger"]
        holder.kill()
    assert row.cause.startswith(f"process {holder.pid} holds its lock")


def test_an_empty_home_is_left_as_it_is(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rows = rows_of(home)
    assert rows["ledger"].state == "not made yet"
    assert not home.exists()


def test_findings_are_printed_below_the_table(tmp_path: Path) -> None:
    said = io.StringIO()
    wrong = StatusRow(part="disk [x]", state="full", fault=Fault.FULL_DISK, cause="0 GiB free")
    print_rows([wrong], Console(file=said, width=200))
    print_rows([StatusRow(part="store", state="up")], Console(file=said, width=200))
    assert "findings: full-disk (disk [x])" in said.getvalue()
    assert "findings: none" in said.getvalue()


def test_replicas_and_boxes_are_told_apart_from_other_parts(tmp_path: Path) -> None:
    replicas = {"run.engine0": ReplicaStatus(state="serving", since=7.0, version=3)}
    boxes = BoxUse(leased=2, waiting=0)
    status = waiting_run("ready groups", time.time())
    with sleeping_run(
        tmp_path, status.model_copy(update={"replicas": replicas, "boxes": boxes})
    ) as directory:
        rows = rows_of(tmp_path)
    of_fleet = {part: row.progress for part, row in rows.items() if row.stage}
    assert of_fleet == {
        f"{directory.name} replica engine0": "version 3",
        f"{directory.name} boxes": "2 in use",
    }
    assert rows[f"{directory.name} boxes"].stage == f"nano-seed0 {directory.name}"


def test_a_sentence_says_what_runs_and_what_needs_the_user(tmp_path: Path) -> None:
    rows: list[StatusRow] = []
    for name in ("problems-012", "reinforced-345"):
        directory = stage(tmp_path, name)
        progress = Progress(done=12, total=26, message="", at=time.time())
        replace_text(directory / PROGRESS, progress.model_dump_json())
        with sleeping_stage(directory):
            rows = collect(here(tmp_path))
        (directory / RESULT).write_text("{}")
    now = "reinforcement of nano-seed0 is at step 12 of 26"
    assert in_a_sentence(rows) == f"{now}; nothing needs you."
    wrong = StatusRow(part="disk", state="full", fault=Fault.FULL_DISK)
    assert in_a_sentence([*rows, wrong]) == f"{now}; needs you: full-disk (disk)."
    assert in_a_sentence([]) == "no stage runs; nothing needs you."


def test_the_command_loads_neither_torch_nor_prefect() -> None:
    look = (
        "import sys, ostinato.flows.cli, ostinato.flows.operating.status.report\n"
        "print({'torch', 'prefect'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
