"""Real rollouts whose boxes come from a real sandbox fleet on Ray; only the model is scripted."""

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.platform.cluster.actors import ask, find_actor
from ostinato.infra.platform.cluster.stage_status import BoxUse
from ostinato.infra.sandbox.fleet.client import FleetClient, RepositoryFleet
from ostinato.infra.sandbox.fleet.node import NodeLoad
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import Outcome, Problem, Trajectory
from ostinato.tasks.rollout.config import BOX_LIMITS
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.one_line_problem import break_line
from tests.fakes.toy_gateway import make_renderer, toy_repository

pytest_plugins = ["tests.fakes.ray_here"]

ANSWERS = (
    "<read_file>pkg/first.py::first</read_file>",
    "<edit_file><L2>    return items[0]</edit_file><run_terminal>pytest</run_terminal>",
    "Fixed.",
)


@pytest.fixture
def repository(tmp_path: Path) -> PreparedRepository:
    return toy_repository(tmp_path)


@pytest.fixture
def problem(repository: PreparedRepository) -> Problem:
    return break_line(
        repository,
        "    return items[0]",
        "    return items[1]",
        symbol="first",
        failing=("tests/test_first.py::test_first",),
        path="pkg/first.py",
    )


def worker_of(repository: PreparedRepository, lender: FleetClient | None) -> RolloutWorker:
    renderer = make_renderer()
    model = AnsweringModel(
        renderer,
        lambda conversation: ANSWERS[min(conversation.count("<|assistant|>"), 2)],
    )
    return RolloutWorker(
        converse=partial(run_agent, model, renderer),
        harness=HarnessConfig(),
        sandboxes=Sandboxes([repository], concurrent_trajectories=4, fleet=lender),
        grade=make_grader(GradingConfig()),
        clock=time.monotonic,
    )


async def attempts(worker: RolloutWorker, problem: Problem, count: int) -> list[Trajectory]:
    tickets = [
        AttemptRequest(f"run.g0.t{index}", "run.g0", problem, index, 0, index)
        for index in range(count)
    ]
    return await asyncio.gather(*(worker.attempt(ticket) for ticket in tickets))


@pytest.mark.nightly
def test_attempts_in_the_fleets_boxes_are_those_in_the_workers_own(
    ray_here: None, repository: PreparedRepository, problem: Problem
) -> None:
    async def run() -> tuple[list[Trajectory], list[Trajectory], NodeLoad]:
        fleet = await RepositoryFleet.start("rollout-boxes", [repository], BOX_LIMITS)
        lent, own = (
            worker_of(repository, FleetClient(fleet.name)),
            worker_of(repository, None),
        )
        in_flight = asyncio.create_task(attempts(lent, problem, 4))
        uses = []
        while not in_flight.done():
            uses.append(lent.boxes())
            await asyncio.sleep(0.01)
        in_fleet = await in_flight
        assert max(use.leased for use in uses) == 4
        assert max(use.waiting for use in uses) == 4
        assert all((use.waiting == 0) == (use.waiting_since is None) for use in uses)
        assert lent.boxes() == BoxUse(leased=0, waiting=0)
        node = find_actor("rollout-boxes-machine0")
        assert node is not None
        after = await ask(node.load.remote(), "load", 60.0)
        in_own = await attempts(own, problem, 1)
        await own.close()
        await lent.close()
        await fleet.close()
        gone = worker_of(repository, FleetClient(fleet.name))
        (lost,) = await attempts(gone, problem, 1)
        await gone.close()
        return in_fleet, [*in_own, lost], after

    in_fleet, (in_own, lost), after = asyncio.run(run())
    for trajectory in in_fleet:
        assert trajectory.outcome is Outcome.FINISHED
        assert trajectory.verdict is not None
        assert trajectory.verdict.passed
        assert trajectory.changed_files == in_own.changed_files != {}
        assert [turn.results for turn in trajectory.transcript.turns] == [
            turn.results for turn in in_own.transcript.turns
        ]
    assert (after.leased, after.waiting) == (0, 0)
    assert lost.outcome is Outcome.SANDBOX_FAILED
    assert "rollout-boxes is not registered" in lost.reason
