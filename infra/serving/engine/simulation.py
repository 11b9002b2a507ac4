"""A fleet on a virtual clock: the real request router and health machine over modelled replicas.

A replica advances every running sequence one token a step; a step takes a fixed time plus a time a
sequence; feeding a prompt stops it for a time a token. Between events nothing is computed, so a
thousand replicas fit into seconds.

The ideal is the same number of sequences spread evenly for ever and every token fed once:
replicas / (step(b) / b + fed tokens a generated token * prefill seconds), b = sequences a replica.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

from ostinato.infra.serving.engine.health import HealthEvent, ReplicaHealth, observe
from ostinato.infra.serving.engine.router import RequestRouter, RouterLimits
from ostinato.infra.serving.engine.states import ReplicaState


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """How fast one replica is."""

    slots: int = 64
    step_seconds: float = 0.010
    sequence_seconds: float = 0.0002
    prefill_token_seconds: float = 0.00002
    restart_seconds: float = 30.0  # from the loss of the process to a verified apply

    def step(self, batch: float) -> float:
        """Seconds of a step with so many sequences."""
        return self.step_seconds + self.sequence_seconds * batch


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions of several turns with heavy-tailed answers; a finished session is replaced at once."""

    sessions_per_replica: float = 64.0
    turns_mean: float = 8.0
    prompt_median_tokens: float = 400.0
    answer_median_tokens: float = 150.0
    sigma: float = 1.2  # of the logarithm of both lengths: the mean is twice the median
    answer_limit_tokens: int = 4096
    context_limit_tokens: int = 32_768


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What one run showed, after its warm-up."""

    tokens_per_second: float
    ideal_tokens_per_second: float
    turns: int
    moved_ratio: float  # turns that began away from their session's cache
    refed_ratio: float  # prompt tokens fed again, of all fed
    failed_turns: int  # lost with their replica and asked again

    @property
    def ideal_ratio(self) -> float:
        return self.tokens_per_second / self.ideal_tokens_per_second


@dataclass(slots=True)
class _Session:
    session_id: str
    turns_left: int
    context_tokens: int = 0
    prompt_tokens: int = 0  # new ones of the turn under way
    answer_tokens: int = 0
    promised_tokens: int = 0
    home: str = ""


@dataclass(slots=True)
class _Replica:
    model: ReplicaModel
    steps: float = 0.0
    at: float = 0.0
    debt_seconds: float = 0.0  # prefill still to be done
    running: list[tuple[float, int, _Session]] = field(default_factory=list)
    waiting: deque[_Session] = field(default_factory=deque)
    cached: dict[str, int] = field(default_factory=dict)
    epoch: int = 0  # of the events planned for it; older ones are void

    def advance(self, now: float) -> None:
        elapsed = now - self.at
        paid = min(self.debt_seconds, elapsed)
        self.debt_seconds -= paid
        if self.running:
            self.steps += (elapsed - paid) / self.model.step(len(self.running))
        self.at = now

    def next_end(self) -> float | None:
        if not self.running:
            return None
        steps = max(0.0, self.running[0][0] - self.steps)
        return self.at + self.debt_seconds + steps * self.model.step(len(self.running))


class FleetSimulation:
    """One run. The same seed gives the same run."""

    def __init__(
        self,
        replicas: int,
        model: ReplicaModel,
        workload: Workload,
        *,
        seed: int,
        limits: RouterLimits | None = None,
        losses_per_replica_second: float = 0.0,
    ) -> None:
        self._names = [f"replica-{index}" for index in range(replicas)]
        self._model = model
        self._workload = workload
        self._random = random.Random(seed)
        self._losses = losses_per_replica_second
        self.router = RequestRouter(self._names, limits=limits)
        self._health = {name: ReplicaHealth(ReplicaState.SERVING) for name in self._names}
        self._replicas = {name: _Replica(model) for name in self._names}
        self._events: list[tuple[float, int, str, int]] = []  # at, number, replica, epoch
        self._number = 0
        self._now = 0.0
        self._unplaced: deque[_Session] = deque()
        self._finished_tokens = 0.0
        self._reset_counts()

    def run(self, warm_up_seconds: float, seconds: float) -> FleetReport:
        """Counts over `seconds` after the warm-up."""
        for index in range(round(self._workload.sessions_per_replica * len(self._names))):
            self._begin_turn(self._new_session(index))
        if self._losses:
            self._plan_loss()
        self._run_until(warm_up_seconds)
        self._reset_counts()
        before = self._generated()
        self._run_until(warm_up_seconds + seconds)
        tokens = self._generated() - before
        fresh = self._fed - self._refed
        return FleetReport(
            tokens_per_second=tokens / seconds,
            ideal_tokens_per_second=self._ideal(fresh / max(1.0, tokens)),
            turns=self._turns,
            moved_ratio=(self.router.moved_sessions - self._moved_before) / max(1, self._turns),
            refed_ratio=self._refed / max(1, self._fed),
            failed_turns=self._failed,
        )

    def _reset_counts(self) -> None:
        self._turns = self._fed = self._refed = self._failed = 0
        self._moved_before = self.router.moved_sessions

    def _ideal(self, fed_per_token: float) -> float:
        batch = min(float(self._model.slots), self._workload.sessions_per_replica)
        seconds = self._model.step(batch) / batch
        return len(self._names) / (seconds + fed_per_token * self._model.prefill_token_seconds)

    def _generated(self) -> float:
        """Tokens made so far, those of unfinished answers included."""
        for replica in self._replicas.values():
            replica.advance(self._now)
        under_way = sum(
            session.answer_tokens - max(0.0, end - replica.steps)
            for replica in self._replicas.values()
            for end, _, session in replica.running
        )
        return self._finished_tokens + under_way

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            at, _, name, epoch = heapq.heappop(self._events)
            self._now = at
            if name == "":
                self._lose_one()
            elif epoch == -1:
                self._come_back(name)
            elif epoch == self._replicas[name].epoch:
                self._end_turns(name)
        self._now = end

    def _new_session(self, index: int) -> _Session:
        turns = 1 + int(self._random.expovariate(1.0 / self._workload.turns_mean))
        return _Session(f"session-{index}-{self._number}", turns)

    def _length(self, median: float, limit: int) -> int:
        drawn = self._random.lognormvariate(math.log(median), self._workload.sigma)
        return max(1, min(limit, int(drawn)))

    def _begin_turn(self, session: _Session) -> None:
        load = self._workload
        session.prompt_tokens = self._length(load.prompt_median_tokens, load.answer_limit_tokens)
        session.answer_tokens = self._length(load.answer_median_tokens, load.answer_limit_tokens)
        self._place(session)

    def _place(self, session: _Session) -> None:
        if not self.router.is_serving():
            self._unplaced.append(session)
            return
        context = session.context_tokens + session.prompt_tokens
        session.promised_tokens = context + self._workload.answer_limit_tokens
        name = self.router.try_choose(
            session.session_id, session.promised_tokens, context_tokens=session.context_tokens
        )
        if name is None:
            self._unplaced.append(session)
            return
        session.home = name
        replica = self._replicas[name]
        replica.advance(self._now)
        replica.waiting.append(session)
        self._fill(name)

    def _fill(self, name: str) -> None:
        """Lets waiting turns take free slots and plans the next end."""
        replica = self._replicas[name]
        while replica.waiting and len(replica.running) < self._model.slots:
            session = replica.waiting.popleft()
            cached = min(replica.cached.get(session.session_id, 0), session.context_tokens)
            fed = session.context_tokens - cached + session.prompt_tokens
            self._fed += fed
            self._refed += session.context_tokens - cached
            replica.debt_seconds += fed * self._model.prefill_token_seconds
            self._number += 1
            end = replica.steps + session.answer_tokens
            heapq.heappush(replica.running, (end, self._number, session))
        replica.epoch += 1
        end_at = replica.next_end()
        if end_at is not None:
            self._plan(end_at, name, replica.epoch)

    def _plan(self, at: float, name: str, epoch: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, name, epoch))

    def _end_turns(self, name: str) -> None:
        replica = self._replicas[name]
        replica.advance(self._now)
        ended = []
        while replica.running and replica.running[0][0] <= replica.steps + 1e-6:
            ended.append(heapq.heappop(replica.running)[2])
        for session in ended:
            self._end_turn(replica, session)
        self._fill(name)
        while self._unplaced:
            waiting = len(self._unplaced)
            self._place(self._unplaced.popleft())
            if len(self._unplaced) == waiting:
                break

    def _end_turn(self, replica: _Replica, session: _Session) -> None:
        self.router.finish(session.home, session.promised_tokens)
        self._turns += 1
        self._finished_tokens += session.answer_tokens
        session.context_tokens += session.prompt_tokens + session.answer_tokens
        replica.cached[session.session_id] = session.context_tokens
        session.turns_left -= 1
        if session.turns_left <= 0 or session.context_tokens > self._workload.context_limit_tokens:
            home = self.router.end_session(session.session_id)
            if home is not None:
                self._replicas[home].cached.pop(session.session_id, None)
            session = self._new_session(self._number)
        self._begin_turn(session)

    def _plan_loss(self) -> None:
        rate = self._losses * len(self._names)
        self._plan(self._now + self._random.expovariate(rate), "", 0)

    def _lose_one(self) -> None:
        """A process dies: its turns fail and are asked again elsewhere."""
        self._plan_loss()
        name = self._random.choice(self._names)
        if self._health[name].state is not ReplicaState.SERVING:
            return
        self._note(name, HealthEvent.LOST)
        replica = self._replicas[name]
        replica.advance(self._now)
        lost = [session for _, _, session in replica.running] + list(replica.waiting)
        self._replicas[name] = _Replica(self._model, at=self._now, epoch=replica.epoch + 1)
        for session in lost:
            self._failed += 1
            self.router.finish(name, session.promised_tokens)
            self._place(session)
        self._plan(self._now + self._model.restart_seconds, name, -1)

    def _come_back(self, name: str) -> None:
        self._note(name, HealthEvent.STARTED)
        self._note(name, HealthEvent.VERIFIED, version=0)
        self._replicas[name].advance(self._now)
        waiting, self._unplaced = self._unplaced, deque()
        for session in waiting:
            self._place(session)

    def _note(self, name: str, event: HealthEvent, version: int | None = None) -> None:
        self._health[name] = observe(self._health[name], event, at=self._now, version=version)
        self.router.set_state(name, self._health[name].state)
