"""Simulated holders: they ask, wait, work, renew, give back, and sometimes die without a word.

What they do depends on their own random generator alone.
"""

import random
from collections.abc import Generator
from typing import Any

import simpy

from ostinato.infra.platform.errors import CapacityExhausted
from ostinato.infra.sandbox.fleet.records import BoxRequest, Granted, Notice, Priority, Refused
from ostinato.infra.sandbox.fleet.scheduler import FleetScheduler
from ostinato.infra.sandbox.simulator.measurements import Measurements
from ostinato.infra.sandbox.simulator.scenario import Burst, Scenario

Process = Generator[simpy.Event, Any, None]

_RENEWALS_PER_LEASE = 3
_SAVE_SHARE = 0.05  # holders that save a state others can fork


class Holders:
    """Everyone who asks for boxes."""

    def __init__(
        self,
        environment: simpy.Environment,
        scenario: Scenario,
        scheduler: FleetScheduler,
        measurements: Measurements,
        rng: random.Random,
    ) -> None:
        self._environment = environment
        self._scenario = scenario
        self._scheduler = scheduler
        self._measurements = measurements
        self._rng = rng
        self._decisions: dict[str, simpy.Event] = {}  # request id -> its grant or refusal
        self._asked: dict[str, tuple[BoxRequest, float]] = {}  # requests without an end, and when
        self._states: list[str] = []

    def start(self) -> None:
        """Begin to ask."""
        self._environment.process(self._arrivals())
        for burst in self._scenario.workload.bursts:
            self._environment.process(self._burst(burst))

    def tell(self, notice: Notice) -> None:
        """Pass a notice on to its holder."""
        counts, request_id = self._measurements.counts, notice.request_id
        if isinstance(notice, Granted):
            if notice.num_moves:
                counts["moved"] += 1
                return
            request, asked_at_seconds = self._asked[request_id]
            waited_seconds = self._environment.now - asked_at_seconds
            self._measurements.waits[request.priority].append(waited_seconds)
            counts["alive"] += 1
            counts["peak_alive"] = max(counts["peak_alive"], counts["alive"])
            self._decisions.pop(request_id).succeed(True)
        elif isinstance(notice, Refused):
            self._measurements.refused[notice.reason.value] += 1
            del self._asked[request_id]
            self._decisions.pop(request_id).succeed(False)
        else:
            counts["reaped" if notice.was_expired else "lost"] += 1
            counts["alive"] -= 1
            del self._asked[request_id]

    def num_unaccounted(self) -> int:
        """Requests that have had no end and that the scheduler knows nothing of."""
        return sum(not self._scheduler.is_live(request_id) for request_id in self._asked)

    def _arrivals(self) -> Process:
        workload, rng = self._scenario.workload, self._rng
        priorities = list(workload.priority_shares)
        weights = list(workload.priority_shares.values())
        while True:
            yield self._environment.timeout(rng.expovariate(workload.requests_per_second))
            self._begin(rng.choices(priorities, weights)[0])

    def _burst(self, burst: Burst) -> Process:
        yield self._environment.timeout(burst.at_seconds)
        for _ in range(burst.num_requests):
            self._begin(burst.priority)

    def _begin(self, priority: Priority) -> None:
        """Ask for one box; what the holder will do is drawn now, whatever the fleet then does."""
        workload, habits, rng = self._scenario.workload, self._scenario.habits, self._rng
        counts = self._measurements.counts
        counts["asked"] += 1
        number = counts["asked"]
        forks = rng.random() < workload.fork_share
        chosen_state = rng.random()
        request = BoxRequest(
            request_id=f"request-{number}",
            template=rng.choices(
                list(workload.template_shares), list(workload.template_shares.values())
            )[0],
            holder_id=f"holder-{number}",
            priority=priority,
            lease_seconds=workload.lease_seconds,
            wait_seconds=workload.wait_seconds,
            fork_of=self._states[int(chosen_state * len(self._states))]
            if forks and self._states
            else None,
            is_movable=rng.random() < workload.movable_share,
        )
        life_seconds = habits.median_life_seconds * rng.lognormvariate(0.0, habits.life_spread)
        dies = rng.random() < workload.dead_holder_share
        saves = rng.random() < _SAVE_SHARE
        self._environment.process(self._live(request, life_seconds, dies=dies, saves=saves))

    def _live(
        self, request: BoxRequest, life_seconds: float, *, dies: bool, saves: bool
    ) -> Process:
        environment, scheduler = self._environment, self._scheduler
        counts, request_id = self._measurements.counts, request.request_id
        try:
            scheduler.ask(request, environment.now)
        except CapacityExhausted:
            self._measurements.refused["at_once"] += 1
            return
        self._asked[request_id] = (request, environment.now)
        decision = self._decisions[request_id] = environment.event()
        is_granted = yield decision
        if not is_granted:
            return
        if saves:
            self._save_state(request_id)
        ends_at_seconds = environment.now + life_seconds
        while (left_seconds := ends_at_seconds - environment.now) > 0:
            yield environment.timeout(
                min(left_seconds, request.lease_seconds / _RENEWALS_PER_LEASE)
            )
            if scheduler.renew(request_id, environment.now) is None:
                return
        if dies:
            counts["dead_holders"] += 1
        elif scheduler.release(request_id, environment.now):
            counts["alive"] -= 1
            self._asked.pop(request_id, None)

    def _save_state(self, request_id: str) -> None:
        if self._scheduler.box_of(request_id) is None:
            return
        state_id = f"state-{request_id}"
        self._scheduler.save_state(state_id, request_id)
        self._states.append(state_id)
        if len(self._states) > self._scenario.workload.num_states:
            self._scheduler.drop_state(self._states.pop(0))
