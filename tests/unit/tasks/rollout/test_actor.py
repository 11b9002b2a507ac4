"""Rollout workers in processes of their own: batches, errors, and the death of a process."""

import asyncio
import functools
import os
import signal
import time
from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.stage_status import BoxUse
from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.records import Outcome, Trajectory
from ostinato.tasks.rollout.actor import RolloutActor, RolloutFleet, start_workers
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.direct_actor import DirectActor
from tests.fakes.rollouts import make_problem, make_trajectory

pytest_plugins = ["tests.fakes.ray_here"]
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("ray_here")]


class ScriptedWorker:
    """Solves at once; a problem called `broken` raises, one called `slow` never ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / f"{os.getpid()}.pid").touch()

    async def attempt(self, ticket: AttemptRequest) -> Trajectory:
        name = ticket.problem.problem_id
        if name == "broken":
            raise ProblemError("problem broken: no such \udcff repository")
        if name == "slow":
            (self._directory / "slow").touch()
            await asyncio.sleep(3600.0)
        return make_trajectory(ticket, versions=(1, 2))

    def boxes(self) -> BoxUse:
        return BoxUse(leased=1, waiting=2, waiting_since=7.0)

    async def close(self) -> None:
        return None


def ticket(problem: str, attempt: int) -> AttemptRequest:
    return AttemptRequest(f"{problem}.t{attempt}", problem, make_problem(problem), attempt, 0, 7)


async def test_workers_answer_raise_and_survive_the_death_of_a_process(tmp_path: Path) -> None:
    workers = start_workers(["worker0"], functools.partial(ScriptedWorker, tmp_path))
    fleet = RolloutFleet(workers, time.time)
    await fleet.open()
    answers = await asyncio.gather(*(fleet.attempt(ticket("p0", index)) for index in range(20)))
    assert [answer.trajectory_id for answer in answers] == [f"p0.t{index}" for index in range(20)]
    assert answers[0].transcript.segments[0].oldest_version == 1

    assert await fleet.boxes() == BoxUse(leased=1, waiting=2, waiting_since=7.0)

    broken = await fleet.attempt(ticket("broken", 0))
    assert broken.outcome is Outcome.SANDBOX_FAILED
    assert broken.reason == "fault: ProblemError: problem broken: no such \\udcff repository"

    slow = asyncio.create_task(fleet.attempt(ticket("slow", 0)))
    while not (tmp_path / "slow").exists():
        await asyncio.sleep(0.01)
    (first,) = (int(path.stem) for path in tmp_path.glob("*.pid"))
    os.kill(first, signal.SIGKILL)
    lost = await slow
    assert lost.outcome is Outcome.SANDBOX_FAILED
    assert "rollout worker worker0 died" in lost.reason
    again = lost
    while again.outcome is Outcome.SANDBOX_FAILED:  # for as long as Ray starts the process again
        again = await fleet.attempt(ticket("p1", 0))
    assert again.outcome is Outcome.FINISHED
    await fleet.close()


async def test_an_attempt_that_was_not_delivered_ends_as_lost(tmp_path: Path) -> None:
    """The process came back before the next collecting call, so that none of these failed."""
    actor = RolloutActor(functools.partial(ScriptedWorker, tmp_path))
    handle = DirectActor(actor, lost=("submit",))
    fleet = RolloutFleet({"worker0": handle}, time.time)  # type: ignore[dict-item]
    await fleet.open()
    lost = await fleet.attempt(ticket("p0", 0))
    assert lost.outcome is Outcome.SANDBOX_FAILED
    assert "worker0" in lost.reason
    assert (await fleet.attempt(ticket("p0", 1))).outcome is Outcome.FINISHED
