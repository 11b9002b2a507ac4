"""Simulated rollouts of a plan on a virtual clock: waiting time of the trainer, and staleness.

The rollout orchestrator (admission, pacing, staleness) and the engines' request router decide as in
a run; attempts, steps and publishes only take time. An attempt waits for a slot on its replica,
generates at the rate of a full replica, then uses tools. Lengths are log-normal, so that some
attempts take many times the mean. Not simulated: failures, groups without spread, shared prefixes.
"""

import asyncio
import functools
import gc
import logging
import random
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from selectors import BaseSelector, DefaultSelector
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import Field

from ostinato.infra.agent.transcript import EndReason, Segment, Transcript, TurnRecord
from ostinato.infra.platform.record import Record
from ostinato.infra.serving.engine.router import RequestRouter
from ostinato.tasks.planning.inputs import RolloutWork
from ostinato.tasks.planning.rollouts import RolloutPlan
from ostinato.tasks.records import Outcome, Problem, Split, Trajectory
from ostinato.tasks.rollout.config import CurriculumConfig, RolloutConfig
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.journal import GroupJournal
from ostinato.tasks.rollout.orchestrator import Limits, Orchestrator
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.steps import RunProgress, StepRequest

Result = TypeVar("Result")


class _JumpingSelector(DefaultSelector):
    """Adds the time the loop wanted to sleep to the virtual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("virtual loop is stuck: nothing is scheduled and nothing is ready")
        self.now_seconds += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on a virtual clock that jumps to the next timer instead of sleeping: a simulated hour
    takes milliseconds and is the same on every run. Its work must not await real sockets or threads.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        selector: BaseSelector = self._jumping
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_seconds


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


PROBLEMS = 64
TURN = TurnRecord(generated_tokens=1, text="", calls=())


class SimulatedLoad(Record):
    """Replicas, attempts and steps of a simulated run, and their durations."""

    rollout: RolloutConfig
    replicas: int = Field(gt=0)
    replica_slots: int = Field(gt=0, description="attempts that a replica generates for at once")
    generation_seconds: float = Field(gt=0, description="mean of an attempt on a full replica")
    tool_seconds: float = Field(ge=0, description="seconds of tools per attempt")
    step_seconds: float = Field(gt=0)
    publish_seconds: float = Field(
        ge=0, description="seconds from a step's end until replicas serve it"
    )
    length_sigma: float = Field(default=0.9, ge=0)
    """deviation of the logarithm: the 99th percentile is 8 times the median"""
    steps: int = Field(default=12, ge=3, description="the first third is not counted")

    @classmethod
    def of_plan(
        cls,
        plan: RolloutPlan,
        work: RolloutWork,
        rollout: RolloutConfig,
        *,
        step_seconds: float,
        publish_seconds: float,
    ) -> Self:
        """The load of planned replicas, with one attempt per planned box."""
        replica = plan.replica
        return cls(
            rollout=rollout.model_copy(update={"concurrent_trajectories": plan.sandboxes}),
            replicas=plan.replicas,
            replica_slots=replica.concurrent_attempts,
            generation_seconds=replica.concurrent_attempts / replica.attempts_per_second,
            tool_seconds=work.tool_seconds,
            step_seconds=step_seconds,
            publish_seconds=publish_seconds,
        ).with_bound(rollout.staleness.max_staleness_versions)

    def with_bound(self, bound: int) -> Self:
        """The same load under another bound on staleness."""
        interval = min(
            self.rollout.staleness.update_interval_steps, bound + 1
        )  # else nothing starts
        staleness = self.rollout.staleness.model_copy(
            update={"max_staleness_versions": bound, "update_interval_steps": interval}
        )
        rollout = self.rollout.model_copy(update={"staleness": staleness})
        return self.model_copy(update={"rollout": rollout, "steps": 3 * max(4, bound + 1)})


class SimulatedRun(Record):
    """Figures of a simulated run."""

    trainer_idle_ratio: float
    staleness_mean: float = Field(description="mean staleness of groups, in weight versions")
    slots_busy_ratio: float = Field(description="busy share of the replicas' slots")
    attempts: int = Field(description="dispatched")
    finished: int
    cancelled: int = Field(description="attempts in flight at the end")


class Simulation:
    """One run. Equal loads give equal runs."""

    def __init__(self, load: SimulatedLoad) -> None:
        self.load = load
        names = [f"replica-{number}" for number in range(load.replicas)]
        self._router = RequestRouter(names)
        self._slots = {name: asyncio.Semaphore(load.replica_slots) for name in names}
        self._generated_seconds = 0.0
        self._step_starts: list[float] = []
        self._staleness: list[float] = []  # mean of each step
        config = load.rollout.model_copy(
            update={
                "least_spread": 0.0,
                "forked_share": 0.0,
                "curriculum": CurriculumConfig(revisit_groups=1),
            }
        )
        self._orchestrator = Orchestrator(
            "simulated",
            config,
            curriculum=Curriculum(
                [_problem(number) for number in range(PROBLEMS)],
                config.curriculum,
                group_size=config.group_size,
                seed=config.seed,
            ),
            journal=GroupJournal(),
            attempt=self._attempt,
            train=self._train,
            limits=Limits(max_steps=load.steps),
            progress=RunProgress(),
        )

    def run(self) -> SimulatedRun:
        """Runs all steps in virtual time."""
        with _undisturbed(logging.getLogger("ostinato.tasks.rollout")):
            ended_at = run_virtual(self._run())
        load, table = self.load, self._orchestrator.table
        skipped = load.steps // 3
        window = ended_at - self._step_starts[skipped]
        return SimulatedRun(
            trainer_idle_ratio=1 - (load.steps - skipped) * load.step_seconds / window,
            staleness_mean=float(np.mean(self._staleness[skipped:])),
            slots_busy_ratio=self._generated_seconds
            / (ended_at * load.replicas * load.replica_slots),
            attempts=self._orchestrator.attempts.dispatched,
            finished=sum(table.outcomes.values()),
            cancelled=len(self._orchestrator.cancelled),
        )

    async def _run(self) -> float:
        await self._orchestrator.run()
        return asyncio.get_running_loop().time()

    async def _attempt(self, request: AttemptRequest) -> Trajectory:
        """A simulated attempt. Its two tokens have the weight versions served at their times."""
        load, clock = self.load, asyncio.get_running_loop().time
        sigma = load.length_sigma
        length = random.Random(request.seed).lognormvariate(-(sigma**2) / 2, sigma)
        started_at = clock()
        # equal weights, since the router does not know the length of an answer
        replica = self._router.choose(request.trajectory_id, 1)
        async with self._slots[replica]:
            first = self._orchestrator.progress.engine_version
            await asyncio.sleep(length * load.generation_seconds)
            self._generated_seconds += length * load.generation_seconds
        self._router.finish(replica, 1)
        self._router.end_session(request.trajectory_id)
        last = self._orchestrator.progress.engine_version
        await asyncio.sleep(load.tool_seconds)
        return request.ended(
            Outcome.FINISHED, "simulated", _transcript(first, last), (started_at, clock())
        )

    async def _train(self, request: StepRequest) -> int:
        """A simulated step. Its weights reach the replicas later, when the next step may already run."""
        loop = asyncio.get_running_loop()
        self._step_starts.append(loop.time())
        self._staleness.append(request.metrics["staleness_mean"])
        await asyncio.sleep(self.load.step_seconds)
        version = request.trainer_version + 1
        if self.load.rollout.staleness.updates_engines(request.step):
            loop.call_later(self.load.publish_seconds, self._orchestrator.engine_applied, version)
        return version


@contextmanager
def _undisturbed(logger: logging.Logger) -> Iterator[None]:
    """Turns off warnings about simulated groups and garbage collection: each collection would scan
    all attempts in flight, which took a third of the time at 10,000 attempts.
    """
    level, collects = logger.level, gc.isenabled()
    logger.setLevel(logging.ERROR)
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        if collects:
            gc.enable()


@functools.cache
def _transcript(first: int, last: int) -> Transcript:
    """An answer of two tokens, sampled with these weight versions."""
    versions = np.array((first, last), dtype=np.int64)
    segment = Segment(
        token_ids_T=np.zeros(2, dtype=np.int32),
        loss_mask_T=np.ones(2, dtype=np.bool_),
        logprobs_T=np.zeros(2, dtype=np.float32),
        weight_versions_T=versions,
        cache_versions_T=versions,
        routed_experts_TLK=np.zeros((2, 0, 0), dtype=np.int16),
    )
    return Transcript(
        segments=(segment,),
        turns=(TURN,),
        end_reason=EndReason.FINISHED,
        final_message="",
        wall_seconds=0.0,
    )


def _problem(number: int) -> Problem:
    return Problem(
        problem_id=f"p{number:03}",
        repository="",
        repository_fingerprint="",
        kind="mutation",
        operator="",
        path="",
        symbol="",
        first_line=1,
        last_line=1,
        prompt="",
        edits=(),
        fail_to_pass=(),
        pass_to_pass=(),
        split=Split.TRAIN,
    )
