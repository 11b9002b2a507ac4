"""SIGKILL of a real RL run, then the same call again: nothing committed is lost, nothing is trained
twice.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from tests.fakes.processes import command_line
from tests.fakes.reinforcement import miniature_request
from tests.faults.killed_runs import kill_after_step, kill_and_resume, processes_after_step
from tests.faults.unreported_step import STEP

STEPS = 3
CLI = (sys.executable, "-c", "from ostinato.flows.cli import main; main()")
ENTRY = "ostinato.tasks.reinforcement.run:main"
UNREPORTED = "tests.faults.unreported_step:main"


def kill_trainer_rank_after_step(run: Path, step: int) -> None:
    """Kills one of the trainer's two ranks alone."""
    _, rank = [p for p in processes_after_step(run, step) if "RankActor" in command_line(p)]
    rank.kill()


def leave_it_to_the_run(run: Path, step: int) -> None:
    """The entry of UNREPORTED kills."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world_size", "boxes", "kill", "entry"),
    [
        # in the milliseconds between the save of a step and its line, which thirty drawn kills hit once
        pytest.param(1, "fleet", leave_it_to_the_run, UNREPORTED, id="all before the line"),
        pytest.param(2, "worker", kill_trainer_rank_after_step, ENTRY, id="one of two ranks"),
        pytest.param(1, "fleet", kill_after_step, ENTRY, id="all", marks=pytest.mark.nightly),
        # what the others show of all processes and of two ranks, together
        pytest.param(
            2, "worker", kill_after_step, ENTRY, id="all of two", marks=pytest.mark.nightly
        ),
    ],
)
def test_run_killed_between_steps_ends_as_if_it_had_not_been(
    tmp_path: Path,
    world_size: int,
    boxes: Literal["worker", "fleet"],
    kill: Callable[..., None],
    entry: str,
) -> None:
    settings = Settings(home=tmp_path / "home", cpu_limit=2)
    plain, run = (
        miniature_request(tmp_path, "killed", STEPS, world_size=world_size, boxes=boxes),
        tmp_path / "run",
    )
    forked = plain.rollout.model_copy(update={"forked_share": 0.5, "group_size": 3})
    request = plain.model_copy(update={"rollout": forked})

    kill_and_resume(request, run, settings, partial(kill, step=STEP), entry)
    restored = read_metrics(run / "metrics.jsonl")[STEP - 1]
    assert {"solve_rate", "reward_mean", "loss", "staleness_mean", "version"} <= restored.keys()
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
