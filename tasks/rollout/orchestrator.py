"""The orchestrator: starts groups, collects trajectories, starts steps.

Whenever something changed it looks at the slot table and does what the policy allows. There is no
barrier: generation goes on while a step runs. Effects come in as callables and time as the loop's
clock, so the same code runs on Ray and on a virtual clock.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import xxhash

from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.records import Group, Outcome, Problem, Trajectory
from ostinato.tasks.rollout.config import RolloutConfig
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.distributions import LengthAndDuration
from ostinato.tasks.rollout.history import GroupResult
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import (
    INFRASTRUCTURE_OUTCOMES,
    Batch,
    GroupSlot,
    GroupState,
    SlotTable,
    reward_spread,
)
from ostinato.tasks.rollout.staleness import StalenessPolicy

logger = logging.getLogger(__name__)
LEAST_WAIT_SECONDS = 0.001  # a timer that rounding fires early must not spin


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Input of one optimiser step."""

    step: int
    trainer_version: int
    groups: tuple[Group, ...]
    metrics: dict[str, float]  # of the rollouts in it


@dataclass(frozen=True, slots=True)
class Wait:
    """Reason and start of a wait, on the loop's clock."""

    what: str
    detail: str
    since_seconds: float


AttemptFunction = Callable[[AttemptRequest], Awaitable[Trajectory]]
StepFunction = Callable[[StepRequest], Awaitable[int]]  # returns the new trainer version


@dataclass(slots=True)
class Limits:
    """Limits of a run."""

    max_steps: int
    budget_seconds: float | None = None
    used_seconds: float = 0.0  # by earlier processes


@dataclass(slots=True)
class Progress:
    """Progress of a run."""

    steps_done: int = 0
    trainer_version: int = 0
    engine_version: int = 0
    groups_started: int = 0
    trainer_idle_seconds: float = 0.0
    slot_seconds_used: float = 0.0
    started_at: float = 0.0
    waits: dict[str, Wait] = field(default_factory=dict)


class Orchestrator:
    """Runs one asynchronous reinforcement run."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        *,
        curriculum: Curriculum,
        journal: RolloutJournal,
        attempt: AttemptFunction,
        train: StepFunction,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.curriculum = curriculum
        self.limits = limits
        self.progress = progress
        self.sampled = LengthAndDuration()
        self.trained = LengthAndDuration()
        policy = StalenessPolicy(config.staleness.max_staleness_versions, config.groups_per_step)
        self.table = SlotTable(policy, least_spread=config.least_spread)
        self._journal = journal
        self._attempt = attempt
        self._train = train
        self._pending: deque[AttemptRequest] = deque()
        self._running: dict[asyncio.Task[Trajectory], AttemptRequest] = {}
        self._retries: set[asyncio.TimerHandle] = set()
        self._step: asyncio.Task[int] | None = None
        self._step_slots: tuple[GroupSlot, ...] = ()
        self._changed = asyncio.Event()
        self._held_since: float | None = None
        self._failed_groups_in_row = 0
        self._failure: BaseException | None = None
        self._trainer_free_since = 0.0
        self.on_group: Callable[[GroupResult], None] = lambda result: None
        self.cancelled: list[str] = []  # trajectories in flight when the run ended

    def engine_applied(self, version: int) -> None:
        """Every replica now serves at least this version."""
        self.progress.engine_version = max(self.progress.engine_version, version)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Ends the run with the error of a part that the orchestrator does not see itself."""
        self._failure = error
        self._changed.set()

    def restore(self, group: Group, birth_version: int) -> None:
        """Takes a group that an earlier process committed and did not train."""
        self.table.restore(group, birth_version)

    async def run(self) -> Progress:
        """Runs until a limit; returns where it ended. Work in flight is cancelled then."""
        clock = asyncio.get_running_loop().time
        self.progress.started_at = self._trainer_free_since = clock()
        try:
            while True:
                self._collect(clock())
                if self._step is None and self._is_over(clock()):
                    return self.progress
                self._retire_stale()
                self._admit(clock())
                self._fill_slots()
                self._start_step(clock())
                await self._wait(clock())
        finally:
            await self._cancel()

    # --- reconciliation

    def _collect(self, now: float) -> None:
        """Takes in everything that ended; an error of any future surfaces here."""
        if self._failure is not None:
            raise self._failure
        for task in [task for task in self._running if task.done()]:
            request = self._running.pop(task)
            self._take_trajectory(request, task.result())
        if self._step is not None and self._step.done():
            self.progress.trainer_version = self._step.result()
            self.progress.steps_done += 1
            for slot in self._step_slots:
                self.trained.add(slot.group.trajectories)
                self.table.end(slot, GroupState.TRAINED)
            self._step, self._step_slots = None, ()
            self._trainer_free_since = now

    def _take_trajectory(self, request: AttemptRequest, trajectory: Trajectory) -> None:
        self.table.outcomes[trajectory.outcome.value] += 1
        if trajectory.outcome in INFRASTRUCTURE_OUTCOMES:
            self._journal.fail(trajectory)
            logger.warning(
                "attempt failed %s",
                fields(
                    trajectory=trajectory.trajectory_id,
                    outcome=trajectory.outcome.value,
                    retry=request.retry,
                    reason=trajectory.reason,
                ),
            )
            if request.retry < self.config.infrastructure_retries:
                self._retry(request)
                return
        else:
            self.sampled.add([trajectory])
        slot = self.table.finish(trajectory)
        if slot is not None:
            self._take_group(slot)

    def _take_group(self, slot: GroupSlot) -> None:
        if slot.state is GroupState.FAILED:
            self._journal.retire(slot.group, f"infrastructure: {slot.trajectories[0].reason}")
            self._failed_groups_in_row += 1
            if self._failed_groups_in_row >= self.config.failed_groups_limit:
                raise ClusterError(
                    f"rollouts of run {self.run_id}: {self._failed_groups_in_row} groups "
                    "in a row lost to infrastructure, wanted fewer than "
                    f"{self.config.failed_groups_limit}; last group {slot.group_id}: "
                    f"{slot.trajectories[0].reason}"
                )
            return
        self._failed_groups_in_row = 0
        group = slot.group
        self._journal.commit(group)
        solved = sum(1 for member in group.trajectories if member.verdict and member.verdict.passed)
        result = GroupResult(
            group_id=group.group_id,
            problem_id=group.problem_id,
            attempts=len(group.trajectories),
            solved=solved,
        )
        self.curriculum.observe(result.problem_id, attempts=result.attempts, solved=solved)
        self.on_group(result)

    def _retry(self, request: AttemptRequest) -> None:
        """Queues a new attempt with an id of its own after a wait."""
        again = self._request(request.problem, request.group_id, request.attempt, request.retry + 1)
        self._journal.reserve([again], self.progress.engine_version)

        def enqueue() -> None:
            self._pending.appendleft(again)
            self._retries.discard(handle)
            self._changed.set()

        delay = self.config.retry_wait_seconds * 2.0**request.retry
        handle = asyncio.get_running_loop().call_later(delay, enqueue)
        self._retries.add(handle)

    def _retire_stale(self) -> None:
        version = self.progress.trainer_version
        for slot in self.table.stale(version):
            reason = (
                f"staleness {version - slot.birth_version} at trainer version {version}, wanted at most "
                f"{self.table.policy.max_staleness_versions}"
            )
            self._journal.retire(slot.group, f"{Outcome.STALE.value}: {reason}")
            for member in slot.group.trajectories:
                self.table.outcomes[member.outcome.value] -= 1
                self.table.outcomes[Outcome.STALE.value] += 1
            self.table.end(slot, GroupState.STALE)
            logger.warning("group is stale %s", fields(group=slot.group_id, reason=reason))

    def _admit(self, now: float) -> None:
        """Starts groups while slots would stay empty and the staleness bound allows it."""
        while len(self._running) + len(self._pending) < self.config.concurrent_trajectories:
            room = self.table.capacity(
                trainer_version=self.progress.trainer_version,
                engine_version=self.progress.engine_version,
            )
            if room == 0:
                detail = f"{len(self.table.groups)} groups, {len(self._running)} attempts in flight"
                self._note("rollouts", "a newer weight version", detail, now)
                return
            self._start_group(now)
        self._note("rollouts", "running attempts", f"{len(self._running)} in flight", now)

    def _start_group(self, now: float) -> None:
        in_flight = {slot.problem_id for slot in self.table.in_state(GroupState.RUNNING)}
        problem = self.curriculum.draw(in_flight)
        group_id = f"{self.run_id}.g{self.progress.groups_started:06d}"
        self.progress.groups_started += 1
        requests = [
            self._request(problem, group_id, attempt, retry=0)
            for attempt in range(self.config.group_size)
        ]
        self._journal.reserve(requests, self.progress.engine_version)
        self.table.open(
            GroupSlot(
                group_id=group_id,
                problem_id=problem.problem_id,
                birth_version=self.progress.engine_version,
                started_at=now,
                trajectories_expected=len(requests),
            )
        )
        self._pending.extend(requests)

    def _request(self, problem: Problem, group_id: str, attempt: int, retry: int) -> AttemptRequest:
        suffix = f".r{retry}" if retry else ""
        trajectory_id = f"{group_id}.t{attempt}{suffix}"
        seed = xxhash.xxh3_64_intdigest(f"{self.config.seed}:{trajectory_id}".encode()) >> 1
        return AttemptRequest(
            trajectory_id, group_id, problem, attempt, retry, seed, self.config.temperature
        )

    def _fill_slots(self) -> None:
        while self._pending and len(self._running) < self.config.concurrent_trajectories:
            request = self._pending.popleft()
            task = asyncio.ensure_future(self._timed_attempt(request))
            task.add_done_callback(self._wake)
            self._running[task] = request
            self.table.dispatched_trajectories += 1

    async def _timed_attempt(self, request: AttemptRequest) -> Trajectory:
        clock = asyncio.get_running_loop().time
        begun = clock()
        trajectory = await self._attempt(request)
        self.progress.slot_seconds_used += clock() - begun
        return trajectory

    def _start_step(self, now: float) -> None:
        if self._step is not None or self._is_over(now):
            return
        batch = self._next_batch(now)
        if not batch.slots:
            self._note("trainer", batch.waits_for, batch.detail, now)
            return
        version = self.progress.trainer_version
        self._step_slots = batch.slots
        for slot in batch.slots:
            slot.state = GroupState.TRAINING
        groups = tuple(slot.group for slot in batch.slots)
        waited = now - self._trainer_free_since
        self.progress.trainer_idle_seconds += waited
        metrics = self._batch_metrics(batch, version) | {"trainer_waited_seconds": waited}
        request = StepRequest(self.progress.steps_done + 1, version, groups, metrics)
        self._note("trainer", f"step {request.step}", f"{len(groups)} groups", now)
        self._step = asyncio.ensure_future(self._train(request))
        self._step.add_done_callback(self._wake)

    def _next_batch(self, now: float) -> Batch:
        """The next batch; late groups are waited for up to the pace limit."""
        version = self.progress.trainer_version
        batch = self.table.next_batch(version)
        if not batch.late_groups:
            self._held_since = None
            return batch
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since >= self.config.staleness.pace_limit_seconds:
            logger.warning(
                "step without late groups %s",
                fields(groups=",".join(batch.late_groups)),
            )
            self._held_since = None
            return self.table.next_batch(version, pace=False)
        return batch

    def _batch_metrics(self, batch: Batch, version: int) -> dict[str, float]:
        ages = [version - slot.birth_version for slot in batch.slots]
        flat = sum(1 for slot in batch.slots if reward_spread(slot.group) == 0)
        return {
            "groups": len(batch.slots),
            "groups_without_spread": flat,
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": max(ages),
            "publish_lag": version - self.progress.engine_version,
            "groups_stale_total": self.table.ended[GroupState.STALE.value],
            "trajectories_dispatched_total": self.table.dispatched_trajectories,
            **{
                f"outcome_{name}_total": count
                for name, count in sorted(self.table.outcomes.items())
            },
            **self.sampled.quantiles("sampled"),
            **self.trained.quantiles("trained"),
        }

    # --- waiting

    def _is_over(self, now: float) -> bool:
        if self.progress.steps_done >= self.limits.max_steps:
            return True
        return (
            self.limits.budget_seconds is not None
            and self.used_seconds(now) >= self.limits.budget_seconds
        )

    def used_seconds(self, now: float) -> float:
        """Of the budget, over all processes of this run."""
        return self.limits.used_seconds + now - self.progress.started_at

    async def _wait(self, now: float) -> None:
        deadlines = []
        if self._held_since is not None:
            deadlines.append(self._held_since + self.config.staleness.pace_limit_seconds - now)
        if self.limits.budget_seconds is not None and self._step is None:
            deadlines.append(self.limits.budget_seconds - self.used_seconds(now))
        timeout = max(LEAST_WAIT_SECONDS, min(deadlines)) if deadlines else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
        self._changed.clear()

    def _wake(self, _task: asyncio.Task[object]) -> None:
        self._changed.set()

    def _note(self, part: str, what: str, detail: str, now: float) -> None:
        """Records what a part waits for; the time stays while `what` stays the same."""
        known = self.progress.waits.get(part)
        since = known.since_seconds if known is not None and known.what == what else now
        self.progress.waits[part] = Wait(what, detail, since)

    async def _cancel(self) -> None:
        self.cancelled = [request.trajectory_id for request in self._running.values()]
        tasks: list[asyncio.Task[object]] = [*self._running]
        if self._step is not None:
            tasks.append(self._step)
        for handle in self._retries:
            handle.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
