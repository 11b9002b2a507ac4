"""SIGKILL of a real RL run, then the same call again: nothing committed is lost, nothing is trained
twice.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import ProcessMark
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import JournalRow
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.reinforcement.records import ReinforcementResult
from tests.fakes.processes import command_line
from tests.fakes.reinforcement import GROUPS_PER_STEP, miniature_request

STEPS = 3
CLI = (sys.executable, "-c", "from ostinato.flows.cli import main; main()")


def processes_after_step(run: Path, step: int) -> list[psutil.Process]:
    """Waits for a step's line; the driver and everything it started."""
    while len(read_metrics(run / "metrics.jsonl")) < step and not (run / "failure.json").exists():
        time.sleep(0.02)
    mark = ProcessMark.model_validate_json((run / "child.pid").read_bytes())
    driver = psutil.Process(mark.pid)
    return [driver, *driver.children(recursive=True)]


def kill_after_step(run: Path, step: int) -> None:
    """Kills all of them without warning."""
    for process in processes_after_step(run, step):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def kill_trainer_rank_after_step(run: Path, step: int) -> None:
    """Kills one of the trainer's two ranks alone."""
    _, rank = [p for p in processes_after_step(run, step) if "RankActor" in command_line(p)]
    rank.kill()


def groups_by_step(rows: list[JournalRow]) -> dict[int, set[str]]:
    trained = defaultdict(set)
    for row in rows:
        if row.trained_step is not None:
            trained[row.trained_step].add(row.group_id)
    return dict(trained)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world_size", "boxes", "kill"),
    [
        (1, "fleet", kill_after_step),
        (2, "worker", kill_trainer_rank_after_step),
        # what the other two show of all processes and of two ranks, together
        pytest.param(2, "worker", kill_after_step, marks=pytest.mark.nightly),
    ],
)
def test_run_killed_between_steps_ends_as_if_it_had_not_been(
    tmp_path: Path,
    world_size: int,
    boxes: Literal["worker", "fleet"],
    kill: Callable[[Path, int], None],
) -> None:
    settings = Settings(home=tmp_path / "home", cpu_limit=2)
    plain, run = (
        miniature_request(tmp_path, "killed", STEPS, world_size=world_size, boxes=boxes),
        tmp_path / "run",
    )
    forked = plain.rollout.model_copy(update={"forked_share": 0.5, "group_size": 3})
    request = plain.model_copy(update={"rollout": forked})

    def start() -> ReinforcementResult:
        return run_child(
            "ostinato.tasks.reinforcement.run:main",
            request,
            ReinforcementResult,
            directory=run,
            settings=settings,
        )

    killer = threading.Thread(target=kill, args=(run, 2), daemon=True)
    killer.start()
    with pytest.raises(ClusterError):
        start()
    killer.join()
    ledger = Ledger(settings.ledger_url)
    before = ledger.journal.rows("killed")
    committed = {row.group_id for row in before if row.commit_sequence is not None}
    result = start()
    after = ledger.journal.rows("killed")
    trained = groups_by_step(after)
    assert (result.steps, result.ended_by) == (STEPS, "max_steps")
    assert sorted(trained) == list(range(1, STEPS + 1))
    assert all(len(groups) == GROUPS_PER_STEP for groups in trained.values())
    assert sum(len(groups) for groups in trained.values()) == len(set().union(*trained.values()))
    assert committed <= {row.group_id for row in after}
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    kept = groups_by_step(before)
    assert trained[1] == kept[1]
    # each step of several ranks starts their processes: of those the one after the kill
    asked = ["--step", str(STEPS)] if world_size > 1 else []
    replayed = subprocess.run(
        [*CLI, "replay", "--run", str(run), *asked],
        env=os.environ | {"OSTINATO_HOME": str(settings.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    count = 1 if asked else STEPS
    assert f"{count} steps, all equal in weights" in replayed.stderr, replayed.stderr
    assert replayed.returncode == 0
