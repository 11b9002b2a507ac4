"""SIGKILL of a drawn process of an RL run or of a real-time cycle under way, or of a whole process group, again and
again: all of it is recovered, nothing is trained or published twice, nothing is left.
"""

import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from tests.fakes.processes import wait_for_end
from tests.fakes.reinforcement import GROUPS_PER_STEP, miniature_request
from tests.faults.cycle_kills import MOMENTS, KilledCycles, broken_laws
from tests.faults.drawn_kills import DrawnKills, left_of

SUPERVISOR, DRIVER = "chaos_program", "child_main"
STEPS_PER_KILL = 8  # some kills take seconds to be seen, and steps are short
_LEFT_SECONDS = 60.0  # what a killed supervisor leaves ends itself after ten, on an idle machine


class Run:
    """An RL run in a home of its own, started again whenever a kill has ended it."""

    def __init__(self, home: Path, steps: int, seed: int) -> None:
        self.home, self.steps = home, steps
        self.kills = DrawnKills(home, seed)
        self.starts = 0
        request = miniature_request(home, "chaos", steps, world_size=2, boxes="fleet")
        (home / "request.json").write_text(request.model_dump_json())
        self.settings = Settings(home=home, cpu_limit=2)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.faults.{SUPERVISOR}", str(self.home)],
            env={**os.environ, **self.settings.to_environment()},
            cwd=Path(__file__).parents[2],
        )

    @property
    def steps_taken(self) -> int:
        return len(read_metrics(self.home / "run" / "metrics.jsonl"))

    def await_step(self) -> None:
        """Until the next step's line, starting the run again when it has ended."""
        taken = self.steps_taken
        while self.steps_taken <= taken or self.process.poll() is not None:
            self._start_again_if_ended()
            time.sleep(0.05)

    def _start_again_if_ended(self) -> None:
        """At once: a driver that outlived its supervisor is found again, or what it left is ended."""
        if self.process.poll() is not None:
            assert self.process.returncode != 0, f"ended after {self.steps_taken} steps"
            self.process = self._start()

    def finish(self) -> None:
        """To the end, starting it again when it has ended without one."""
        while self.process.wait() != 0:
            self._start_again_if_ended()


def check_chaos(home: Path, kills: int, seed: int) -> Counter[str]:
    """Kills after as many steps, and the laws of a run that was never killed."""
    before = {process.pid for process in psutil.process_iter()}
    run = Run(home, STEPS_PER_KILL * kills, seed)
    for _ in range(kills):
        run.await_step()
        time.sleep(run.kills.dice.random())
        run.kills.kill()
    run.finish()
    rows = Ledger(run.settings.ledger_url).journal.rows("chaos")
    trained = defaultdict(set)
    for row in rows:
        if row.trained_step is not None:
            trained[row.trained_step].add(row.group_id)
    assert sorted(trained) == list(range(1, run.steps + 1))
    assert all(len(groups) == GROUPS_PER_STEP for groups in trained.values())
    assert sum(map(len, trained.values())) == len(set().union(*trained.values()))
    metrics = read_metrics(home / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == sorted(trained)
    wait_for_end(left_of(home, before), _LEFT_SECONDS)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    assert [mount for mount in mounts if str(home) in mount] == []
    return run.kills.hit


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_run_of_which_three_drawn_processes_are_killed_ends_as_if_none_had_been(
    tmp_path: Path,
) -> None:
    check_chaos(tmp_path, 3, seed=5)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", [1, 2])
def test_run_of_which_fifteen_drawn_processes_are_killed_ends_as_if_none_had_been(
    tmp_path: Path, seed: int
) -> None:
    hit = check_chaos(tmp_path, 15, seed)
    wanted = {SUPERVISOR, DRIVER, "RankActor", "RolloutActor", "BoxNode", "bwrap"}
    assert wanted | {"EngineReplica", "all"} <= set(hit), hit


def check_cycles(home: Path, kills: int, seed: int) -> Counter[str]:
    """As many cycles with a kill in each, at all moments in turn, and the laws of cycles that nothing disturbed."""
    before = {process.pid for process in psutil.process_iter()}
    cycles = KilledCycles(home, seed)
    try:
        for number in range(kills):
            cycles.run_cycle(list(MOMENTS)[(seed + number) % len(MOMENTS)])
    finally:
        cycles.end()
    wait_for_end(left_of(home, before), _LEFT_SECONDS)
    assert list(broken_laws(cycles.machine.settings, kills)) == []
    return cycles.kills.hit


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.nightly
def test_two_cycles_with_a_kill_in_each_end_as_if_none_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    check_cycles(tmp_path, 2, seed=2)


@pytest.mark.nightly
@pytest.mark.timeout(10_800)
def test_thirty_cycles_with_a_kill_in_each_end_as_if_none_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    hit = check_cycles(tmp_path, 30, seed=1)
    assert {"flow", "worker", "server", "child_main", "rank", "bwrap", "all"} <= set(hit), hit
