"""Attempts of a run: waiting for a slot, in flight, and retries."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import SupportsFloat

import xxhash

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.records import Problem, Trajectory
from ostinato.tasks.rollout.config import SAMPLERS, RolloutConfig
from ostinato.tasks.rollout.records import AttemptRequest

logger = logging.getLogger(__name__)
_RETRY_WAIT_SECONDS = 0.5  # before the first retry
_MAX_TEMPERATURE = 10.0  # above it tokens are nearly uniform

AttemptFunction = Callable[[AttemptRequest], Awaitable[Trajectory]]
# From a problem, the number of the attempt in its group, the attempts per group and the temperature of the recipe,
# the temperature of the attempt. It depends on nothing else, so that a resumed run samples alike.
AttemptTemperature = Callable[[Problem, int, int, float], float]


def constant_temperature(
    problem: Problem, attempt: int, group_size: int, temperature: float
) -> float:
    """The temperature of the recipe."""
    return temperature


class AttemptPool:
    """Attempts that wait or are in flight. `on_change` is called when an attempt has ended or may start."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        attempt: AttemptFunction,
        on_change: Callable[[], None],
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._attempt = attempt
        self._sampler: AttemptTemperature = SAMPLERS.load(config.sampler)
        self._on_change = on_change
        self._pending: deque[AttemptRequest] = deque()
        self._running: dict[asyncio.Task[Trajectory], AttemptRequest] = {}
        self._ended: list[asyncio.Task[Trajectory]] = []
        self._retries: set[asyncio.TimerHandle] = set()
        self.dispatched = 0
        self.busy_seconds = 0.0  # summed over slots

    @property
    def num_running(self) -> int:
        """Attempts in flight."""
        return len(self._running)

    @property
    def has_capacity(self) -> bool:
        """Whether waiting and running attempts leave a slot empty."""
        return len(self._running) + len(self._pending) < self._config.concurrent_trajectories

    def group_id(self, number: int) -> str:
        """Id of the group with this number."""
        return f"{self._run_id}.g{number:06d}"

    def request(
        self, problem: Problem, group_id: str, attempt: int, retry: int = 0
    ) -> AttemptRequest:
        """Request for an attempt, with its own id and seed."""
        suffix = f".r{retry}" if retry else ""
        trajectory_id = f"{group_id}.t{attempt}{suffix}"
        seed = xxhash.xxh3_64_intdigest(f"{self._config.seed}:{trajectory_id}".encode()) >> 1
        temperature = self._temperature(problem, attempt)
        return AttemptRequest(trajectory_id, group_id, problem, attempt, retry, seed, temperature)

    def _temperature(self, problem: Problem, attempt: int) -> float:
        """ConfigError when the sampler gives no temperature at which every token can be drawn."""
        config = self._config
        given = self._sampler(problem, attempt, config.group_size, config.temperature)
        if not isinstance(given, SupportsFloat) or not 0 < float(given) <= _MAX_TEMPERATURE:
            raise ConfigError(
                f"sampler {config.sampler!r} gives attempt {attempt} at problem {problem.problem_id} the temperature "
                f"{given!r:.200}, wanted a number above 0, at most {_MAX_TEMPERATURE:g}"
            )
        return float(given)

    def add(self, requests: Iterable[AttemptRequest]) -> None:
        self._pending.extend(requests)

    def add_retry(self, again: AttemptRequest) -> None:
        """Queues an attempt before all others, after a wait that doubles with each retry."""

        def enqueue() -> None:
            self._pending.appendleft(again)
            self._retries.discard(handle)
            self._on_change()

        delay = _RETRY_WAIT_SECONDS * 2.0 ** (again.retry - 1)
        handle = asyncio.get_running_loop().call_later(delay, enqueue)
        self._retries.add(handle)

    def fill_slots(self) -> None:
        """Starts waiting attempts until all slots are in use."""
        while self._pending and len(self._running) < self._config.concurrent_trajectories:
            request = self._pending.popleft()
            task = asyncio.ensure_future(self._timed(request))
            task.add_done_callback(self._note_end)
            self._running[task] = request
            self.dispatched += 1

    def pop_finished(self) -> Iterator[tuple[AttemptRequest, Trajectory]]:
        """Attempts that ended since the last call, with their trajectories."""
        ended, self._ended = self._ended, []
        for task in ended:
            yield self._running.pop(task), task.result()

    async def cancel(self) -> list[str]:
        """Cancels all attempts and retries. Returns the ids of the trajectories that were in flight."""
        for handle in self._retries:
            handle.cancel()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        return [request.trajectory_id for request in self._running.values()]

    def _note_end(self, task: asyncio.Task[Trajectory]) -> None:
        self._ended.append(task)
        self._on_change()

    async def _timed(self, request: AttemptRequest) -> Trajectory:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        try:
            trajectory = await self._attempt(request)
        except (
            Exception
        ) as error:  # the orchestrator counts lost groups and ends the run at a limit
            logger.exception("attempt failed %s", fields(trajectory=request.trajectory_id))
            trajectory = request.lost(f"fault: {type(error).__name__}: {error}", clock())
        self.busy_seconds += clock() - started_at
        return trajectory
