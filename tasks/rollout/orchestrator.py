"""The orchestrator: starts groups, collects trajectories, starts steps.

After every change it reads the group table and starts what the staleness policy allows. There is no
barrier: generation continues while a step runs. Effects are passed in as callables and time is the
loop's clock, so that the same code runs on Ray and on a virtual clock.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ostinato.infra.platform.errors import ClusterError, ConfigError, boundary
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.records import Outcome, Trajectory
from ostinato.tasks.rollout.attempts import AttemptFunction, AttemptPool
from ostinato.tasks.rollout.config import ADMISSIONS, RolloutConfig
from ostinato.tasks.rollout.curriculum import Curriculum, GroupResult
from ostinato.tasks.rollout.distributions import LengthAndDuration
from ostinato.tasks.rollout.forks import ForkedGroups
from ostinato.tasks.rollout.journal import GroupJournal
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import INFRASTRUCTURE_OUTCOMES, GroupSlot, GroupState, GroupTable
from ostinato.tasks.rollout.staleness import Admission, ConsumptionEstimate, StalenessPolicy
from ostinato.tasks.rollout.steps import RunProgress, StepFunction, StepRunner

logger = logging.getLogger(__name__)
_FAILED_GROUPS_LIMIT = 4  # groups in a row lost to infrastructure that end the run
LEAST_WAIT_SECONDS = 0.001  # prevents a busy loop when rounding makes a timer fire early


@dataclass(slots=True)
class Limits:
    """Limits of a run."""

    max_steps: int
    budget_seconds: float | None = None
    used_seconds: float = 0.0  # by earlier processes


def _count_useful_groups(
    admission: Admission, consumption: ConsumptionEstimate, config: RolloutConfig
) -> int | None:
    """Outstanding groups up to which another starts. ConfigError unless it is a count, or None."""
    what = f"rollout.staleness.admission {config.staleness.admission!r}"
    with boundary(ConfigError, what):
        found = admission(consumption, config.groups_per_step)
    if found is None or (type(found) is int and found > 0):
        return found
    raise ConfigError(f"{what} gives {found!r:.200}, wanted a whole number of at least 1, or None")


class Orchestrator:
    """Control loop of one asynchronous reinforcement run."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        *,
        curriculum: Curriculum,
        journal: GroupJournal,
        attempt: AttemptFunction,
        train: StepFunction,
        limits: Limits,
        progress: RunProgress,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.curriculum = curriculum
        self.limits = limits
        self.progress = progress
        self.sampled = LengthAndDuration()
        policy = StalenessPolicy(config.staleness.max_staleness_versions, config.groups_per_step)
        self.table = GroupTable(policy, least_spread=config.least_spread)
        self._journal = journal
        self._consumption = ConsumptionEstimate()
        self._admission: Admission = ADMISSIONS.load(config.staleness.admission)
        self._changed = asyncio.Event()
        self.attempts = AttemptPool(run_id, config, attempt, self._changed.set)
        pace_limit = config.staleness.pace_limit_seconds
        self.steps = StepRunner(self.table, progress, train, pace_limit, self._changed.set)
        self._forks = ForkedGroups(config.forked_share)
        self._failed_groups_in_row = 0
        self._failure: BaseException | None = None
        self.on_group: Callable[[GroupResult], None] = lambda result: None
        self.cancelled: list[str] = []  # trajectories in flight when the run ended

    def engine_applied(self, version: int) -> None:
        """Records that every replica now serves at least this version."""
        self.progress.engine_version = max(self.progress.engine_version, version)
        self._changed.set()

    def start_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts background work, for the caller to cancel. Its error ends the run."""

        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = error
                self._changed.set()

        task = asyncio.create_task(work)
        task.add_done_callback(note_end)
        return task

    async def run(self) -> RunProgress:
        """Runs until a limit is reached, then cancels work in flight. Returns the progress."""
        clock = asyncio.get_running_loop().time
        self.progress.started_at = clock()
        self.steps.begin(self.progress.started_at)
        try:
            while True:
                self._collect(clock())
                if not self.steps.is_running and self._is_over(clock()):
                    return self.progress
                self._retire_stale()
                self._admit(clock())
                self.attempts.fill_slots()
                self._start_step(clock())
                await self._wait(clock())
        finally:
            self.cancelled = await self.attempts.cancel()
            await self.steps.cancel()

    # --- reconciliation

    def _collect(self, now: float) -> None:
        """Processes ended attempts and steps. Raises the error of a failed step."""
        if self._failure is not None:
            raise self._failure
        for request, trajectory in self.attempts.pop_finished():
            self._process_trajectory(request, trajectory)
        seconds = self.steps.pop_finished(now)
        if seconds is not None:
            self._consumption.record_step(seconds)

    def _process_trajectory(self, request: AttemptRequest, trajectory: Trajectory) -> None:
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
                again = request.again(
                    self.attempts.request(
                        request.problem, request.group_id, request.attempt, request.retry + 1
                    )
                )
                self._journal.reserve([again], self.progress.engine_version)
                self.attempts.add_retry(again)
                return
        else:
            self.sampled.add([trajectory])
        self.attempts.add(self._forks.continued(request, trajectory))
        slot = self.table.finish(trajectory)
        if slot is not None:
            self._process_group(slot)

    def _process_group(self, slot: GroupSlot) -> None:
        if slot.state is GroupState.FAILED:
            self._journal.retire(slot.group, f"infrastructure: {slot.trajectories[0].reason}")
            self._failed_groups_in_row += 1
            if self._failed_groups_in_row >= _FAILED_GROUPS_LIMIT:
                raise ClusterError(
                    f"rollouts of run {self.run_id}: {self._failed_groups_in_row} groups "
                    "in a row lost to infrastructure, wanted fewer than "
                    f"{_FAILED_GROUPS_LIMIT}; last group {slot.group_id}: "
                    f"{slot.trajectories[0].reason}"
                )
            return
        self._failed_groups_in_row = 0
        group = slot.group
        self._consumption.record_group(asyncio.get_running_loop().time() - slot.started_at)
        solved = sum(1 for member in group.trajectories if member.verdict and member.verdict.passed)
        result = GroupResult(
            group_id=group.group_id,
            problem_id=group.problem_id,
            attempts=len(group.trajectories),
            solved=solved,
        )
        self.on_group(
            result
        )  # before the commit, so that no committed group lacks its result after a kill
        self._journal.commit(group)
        self.curriculum.observe(result.problem_id, attempts=result.attempts, solved=solved)

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
        """Starts groups while slots are empty and the staleness bound allows it."""
        running = self.attempts.num_running
        while self.attempts.has_capacity:
            if self.curriculum.is_exhausted:
                self.progress.note("rollouts", "nothing", "every problem had its group", now)
                return
            useful = _count_useful_groups(self._admission, self._consumption, self.config)
            capacity = self.table.capacity(
                trainer_version=self.progress.trainer_version,
                engine_version=self.progress.engine_version,
                useful_groups=useful,
            )
            if capacity == 0:
                detail = f"{len(self.table.groups)} groups, {running} attempts in flight"
                self.progress.note("rollouts", "the trainer", detail, now)
                return
            self._start_group(now)
        self.progress.note("rollouts", "running attempts", f"{running} in flight", now)

    def _start_group(self, now: float) -> None:
        problem = self.curriculum.draw(self.table.problems)
        number = self.progress.groups_started
        group_id = self.attempts.group_id(number)
        self.progress.groups_started += 1
        requests = [
            self.attempts.request(problem, group_id, attempt)
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
        self.attempts.add(self._forks.begin(number, requests))

    def _start_step(self, now: float) -> None:
        if self.steps.is_running or self._is_over(now):
            return
        batch = self.steps.next_batch(now, is_last=self.is_drained)
        if not batch.slots:
            self.progress.note("trainer", batch.waits_for, batch.detail, now)
            return
        metrics = {
            "trajectories_dispatched_total": self.attempts.dispatched,
            **self.sampled.quantiles("sampled"),
        }
        self.steps.start(batch, now, metrics)

    # --- waiting

    def _is_over(self, now: float) -> bool:
        if self.progress.steps_done >= self.limits.max_steps:
            return True
        if self.is_drained and not self.table.filling:
            return True
        return (
            self.limits.budget_seconds is not None
            and self.used_seconds(now) >= self.limits.budget_seconds
        )

    @property
    def is_drained(self) -> bool:
        """Whether no group is running and none can start any more."""
        return self.curriculum.is_exhausted and not self.table.num_running

    def used_seconds(self, now: float) -> float:
        """Seconds used by this and all earlier processes of the run."""
        return self.limits.used_seconds + now - self.progress.started_at

    async def _wait(self, now: float) -> None:
        deadlines = []
        if self.steps.held_until is not None:
            deadlines.append(self.steps.held_until - now)
        if self.limits.budget_seconds is not None and not self.steps.is_running:
            deadlines.append(self.limits.budget_seconds - self.used_seconds(now))
        timeout = max(LEAST_WAIT_SECONDS, min(deadlines)) if deadlines else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
        self._changed.clear()
