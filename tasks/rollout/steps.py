"""Steps of a run: its progress so far, the running step, and the pacing of the next one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.records import Group
from ostinato.tasks.rollout.distributions import LengthAndDuration
from ostinato.tasks.rollout.slots import Batch, GroupSlot, GroupState, GroupTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Input of one optimiser step."""

    step: int
    trainer_version: int
    groups: tuple[Group, ...]
    metrics: dict[str, float]  # of its rollouts


@dataclass(frozen=True, slots=True)
class Wait:
    """Reason and start of a wait, on the loop's clock."""

    what: str
    detail: str
    since_seconds: float


StepFunction = Callable[[StepRequest], Awaitable[int]]  # returns the new trainer version


@dataclass(slots=True)
class RunProgress:
    """Counters of a run, and reasons why its parts wait."""

    steps_done: int = 0
    trainer_version: int = 0
    engine_version: int = 0
    groups_started: int = 0
    trainer_idle_seconds: float = 0.0
    started_at: float = 0.0
    waits: dict[str, Wait] = field(default_factory=dict)

    def note(self, part: str, what: str, detail: str, now: float) -> None:
        """Records what a part waits for. The start of the wait is kept while `what` stays the same."""
        known = self.waits.get(part)
        since = known.since_seconds if known is not None and known.what == what else now
        self.waits[part] = Wait(what, detail, since)


class StepRunner:
    """Runs one step at a time. A step waits for late groups up to the pace limit."""

    def __init__(
        self,
        table: GroupTable,
        progress: RunProgress,
        train: StepFunction,
        pace_limit_seconds: float,
        on_change: Callable[[], None],
    ) -> None:
        self.trained = LengthAndDuration()
        self._table, self._progress, self._train = table, progress, train
        self._pace_limit_seconds, self._on_change = pace_limit_seconds, on_change
        self._task: asyncio.Task[int] | None = None
        self._slots: tuple[GroupSlot, ...] = ()
        self._started_at = 0.0
        self._free_since = 0.0
        self._held_since: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether a step is running."""
        return self._task is not None

    @property
    def held_until(self) -> float | None:
        """Time until which the next step waits for late groups. None: it does not wait for any."""
        return None if self._held_since is None else self._held_since + self._pace_limit_seconds

    def begin(self, now: float) -> None:
        """Counts the trainer as idle from now on."""
        self._free_since = now

    def pop_finished(self, now: float) -> float | None:
        """Seconds of the step that ended, or None. Raises the error of a failed step."""
        if self._task is None or not self._task.done():
            return None
        self._progress.trainer_version = self._task.result()
        self._progress.steps_done += 1
        for slot in self._slots:
            self.trained.add(slot.group.trajectories)
            self._table.end(slot, GroupState.TRAINED)
        self._task, self._slots = None, ()
        self._free_since = now
        return now - self._started_at

    def next_batch(self, now: float, *, is_last: bool) -> Batch:
        """The batch of the next step. It waits for late groups up to the pace limit."""
        version = self._progress.trainer_version
        batch = self._table.next_batch(version, is_last=is_last)
        if not batch.late_groups:
            self._held_since = None
            return batch
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since >= self._pace_limit_seconds:
            logger.warning("step without %s", fields(late_groups=",".join(batch.late_groups)))
            self._held_since = None
            return self._table.next_batch(version, pace=False)
        return batch

    def start(self, batch: Batch, now: float, rollout_metrics: dict[str, float]) -> None:
        """Starts a step with a batch."""
        version = self._progress.trainer_version
        self._slots = batch.slots
        self._table.take(batch.slots)
        groups = tuple(slot.group for slot in batch.slots)
        waited = now - self._free_since
        self._progress.trainer_idle_seconds += waited
        metrics = self._table.describe(batch, version) | {
            "trainer_waited_seconds": waited,
            "publish_lag": version - self._progress.engine_version,
            **rollout_metrics,
            **self.trained.quantiles("trained"),
        }
        request = StepRequest(self._progress.steps_done + 1, version, groups, metrics)
        self._progress.note("trainer", f"step {request.step}", f"{len(groups)} groups", now)
        self._started_at = now
        self._task = asyncio.ensure_future(self._train(request))
        self._task.add_done_callback(lambda _: self._on_change())

    async def cancel(self) -> None:
        """Cancels the running step, if there is one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
