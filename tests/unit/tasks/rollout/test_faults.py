"""Any exception at any wait of a rollout is the outcome of one attempt, with a reason."""

import asyncio
import errno
import random
import time
from functools import partial
from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import EndReason
from ostinato.infra.platform.errors import (
    CapacityExhausted,
    ConfigError,
    EngineError,
    GradingError,
    SandboxLost,
    StorageError,
)
from ostinato.infra.sandbox.host.backend import NamespaceBackend
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import VerdictCache
from ostinato.models.rendering import Renderer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import Outcome, Problem, Trajectory
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.chaos import Chaos
from tests.unit.tasks.rollout.test_worker import answer_by_turn

ERRORS = (
    OSError(errno.ENOTEMPTY, "Directory not empty"),
    OSError(errno.EMFILE, "Too many open files"),
    RuntimeError("no reason"),
    KeyError("exit_code"),
    UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    EngineError("replica r0 is gone"),
    SandboxLost("the box is gone"),
    CapacityExhausted("no room"),
    GradingError("reward mine: ValueError"),
    ConfigError("no such key"),
    StorageError("the disk is full"),
)


class Rollouts:
    """A worker over real boxes with a scripted model, and its attempts so far."""

    def __init__(
        self, renderer: Renderer, repository: PreparedRepository, problem: Problem, twice: float
    ) -> None:
        self.model = AnsweringModel(renderer, answer_by_turn)
        self.sandboxes = Sandboxes([repository], concurrent_trajectories=2)
        # nothing is remembered: each attempt is judged
        self.sandboxes.of(problem).test_server.cache = VerdictCache(capacity=0)
        self.problem = problem
        self.worker = RolloutWorker(
            converse=partial(run_agent, self.model, renderer),
            harness=HarnessConfig(context_tokens=4000, max_generated_tokens=3000),
            sandboxes=self.sandboxes,
            grade=make_grader(GradingConfig(second_runner_share=twice)),
            clock=time.monotonic,
        )
        self.number = 0

    async def attempt(self) -> Trajectory:
        self.number += 1
        name = f"run.g0.t{self.number}"
        return await self.worker.attempt(
            AttemptRequest(name, "run.g0", self.problem, self.number, 0, 1)
        )


def directory_of(sandboxes: Sandboxes) -> Path:
    backend = sandboxes._backend
    assert isinstance(backend, NamespaceBackend)
    return backend.store.directory


async def no_box_is_left(sandboxes: Sandboxes) -> None:
    """Returns once every box has ended. A start that attempts share goes on without them."""
    async with asyncio.timeout(20.0):
        while list(directory_of(sandboxes).glob("b[0-9]*")):
            await asyncio.sleep(0.01)


async def throw_everywhere(rollouts: Rollouts, stride: int) -> list[Trajectory]:
    """One attempt for each of every `stride`th wait, into which an error is thrown."""
    chaos, chance = Chaos(), random.Random(5)
    asyncio.get_running_loop().set_task_factory(chaos)
    ended = []
    for _ in range(2):  # the first starts the test server
        begun = chaos.waits
        await asyncio.create_task(rollouts.attempt())
        per_attempt = chaos.waits - begun
    for wait in range(1, per_attempt + 2, stride):
        chaos.at = {chaos.waits + wait: chance.choice(ERRORS)}
        ended.append(await asyncio.create_task(rollouts.attempt()))
        chaos.at = {}
        await no_box_is_left(rollouts.sandboxes)
    clean = await asyncio.create_task(rollouts.attempt())
    assert clean.verdict is not None
    assert clean.verdict.passed, clean.reason
    return ended


@pytest.mark.parametrize(
    ("stride", "twice"),
    [(4, 0.0), pytest.param(1, 1.0, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])],
)
def test_any_exception_at_any_wait_is_an_outcome(
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    stride: int,
    twice: float,
) -> None:
    async def run() -> list[Trajectory]:
        rollouts = Rollouts(renderer, repository, problem, twice)
        ended = await throw_everywhere(rollouts, stride)
        await rollouts.worker.close()
        assert not directory_of(rollouts.sandboxes).exists()
        return ended

    ended = asyncio.run(run())
    assert len(ended) > 40 / stride
    assert all(one.reason for one in ended)
    kinds = {one.outcome for one in ended}
    assert Outcome.SANDBOX_FAILED in kinds
    for one in ended:
        if one.transcript.end_reason is EndReason.FAULT:
            assert one.is_fault
            assert one.verdict is not None
            assert not one.verdict.passed
            assert one.reward.flags


def test_start_that_somebody_else_ended_is_an_outcome_and_is_tried_again(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    async def run() -> tuple[Trajectory, Trajectory]:
        rollouts = Rollouts(renderer, repository, problem, 0.0)
        starts = rollouts.sandboxes.of(problem)._starts
        begun = asyncio.create_task(rollouts.attempt())
        while not starts:
            await asyncio.sleep(0)
        next(iter(starts.values())).cancel()
        ended = await begun, await rollouts.attempt()
        await rollouts.worker.close()
        return ended

    first, second = asyncio.run(run())
    assert first.verdict is None
    assert "CancelledError" in first.reason
    assert second.verdict is not None
    assert second.verdict.passed, second.reason


def test_attempt_that_is_cancelled_itself_has_no_outcome(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    async def run() -> None:
        rollouts = Rollouts(renderer, repository, problem, 0.0)
        begun = asyncio.create_task(rollouts.attempt())
        while not rollouts.sandboxes.of(problem)._starts:
            await asyncio.sleep(0)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        await rollouts.worker.close()

    asyncio.run(run())
