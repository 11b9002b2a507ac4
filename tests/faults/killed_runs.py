"""An RL run that is killed and started again by the same call, and what must hold of its journal then."""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import ProcessMark
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import JournalRow
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult
from tests.fakes.reinforcement import GROUPS_PER_STEP


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


def groups_by_step(rows: list[JournalRow]) -> dict[int, set[str]]:
    trained = defaultdict(set)
    for row in rows:
        if row.trained_step is not None:
            trained[row.trained_step].add(row.group_id)
    return dict(trained)


def kill_and_resume(
    request: ReinforcementRequest,
    run: Path,
    settings: Settings,
    kill: Callable[[Path], None],
    entry: str = "ostinato.tasks.reinforcement.run:main",
) -> None:
    """Starts a run, kills it and starts it again. Nothing committed is lost, and nothing is trained twice."""

    def start() -> ReinforcementResult:
        return run_child(
            entry,
            request,
            ReinforcementResult,
            directory=run,
            settings=settings,
        )

    killer = threading.Thread(target=kill, args=(run,), daemon=True)
    killer.start()
    with pytest.raises(ClusterError):
        start()
    killer.join()
    journal = Ledger(settings.ledger_url).journal
    before = journal.rows(request.run_id)
    result = start()
    after = journal.rows(request.run_id)
    trained, steps = groups_by_step(after), list(range(1, request.max_steps + 1))
    assert (result.steps, result.ended_by) == (request.max_steps, "max_steps")
    assert sorted(trained) == steps
    assert all(len(groups) == GROUPS_PER_STEP for groups in trained.values())
    assert sum(len(groups) for groups in trained.values()) == len(set().union(*trained.values()))
    assert trained[1] == groups_by_step(before)[1]
    committed = {row.group_id for row in before if row.commit_sequence is not None}
    assert committed <= {row.group_id for row in after}
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == steps
