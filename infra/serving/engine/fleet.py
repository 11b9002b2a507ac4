"""Several engine replicas as one `ModelClient`.

`EngineFleet` is the client side: routing, error translation, health, updates of all replicas. Several
processes may each have a fleet over the same actors, which `start_replicas` starts. When a replica dies, its
requests raise EngineError. They are not repeated here: only the caller knows whether that is safe.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ostinato.infra.platform.cluster.stage_status import ReplicaStatus
from ostinato.infra.platform.errors import EngineError, OstinatoError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.serving.engine.health import (
    HealthEvent,
    ReplicaHealth,
    ReplicaState,
    SwapReport,
    observe,
    observe_report,
)
from ostinato.infra.serving.engine.mailbox import Mailbox
from ostinato.infra.serving.engine.router import STEAL_MARGIN_TOKENS, RequestRouter
from ostinato.models.decode.protocol import GenerateRequest, Generation

_logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 180.0  # a request waits this long for a serving replica; a restart takes 10 s
_REFRESH_SECONDS = 1.0
_POLL_SECONDS = 0.02  # between two looks for a serving replica
_PROBE_SECONDS = 60.0  # a replica that answers no question for this long is silent


class EngineFleet:
    """A `ModelClient` over replicas."""

    def __init__(
        self,
        replicas: Mapping[str, ActorHandle],
        *,
        timeout_seconds: float = _TIMEOUT_SECONDS,
        probe_seconds: float = _PROBE_SECONDS,
        steal_margin_tokens: int = STEAL_MARGIN_TOKENS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._probe_seconds = probe_seconds
        self._clock = clock
        self._refreshed_at = float("-inf")
        self._refreshing: asyncio.Task[dict[str, ReplicaState]] | None = None
        self._replicas = dict(replicas)
        self._router = RequestRouter(
            list(replicas), state=ReplicaState.STARTING, steal_margin_tokens=steal_margin_tokens
        )
        self._health = {name: ReplicaHealth(since=clock()) for name in replicas}
        self._mailboxes = {
            name: Mailbox(name, actor, partial(self._observe_silence, name))
            for name, actor in replicas.items()
        }

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer on the replica that holds the session, or the least busy one."""
        tokens = len(request.token_ids) + request.max_new_tokens
        replica_id = await self._choose(request, tokens)
        try:
            call = self._mailboxes[replica_id].generate(request)
            return await self._answer(call, replica_id, f"request {request.request_id}")
        except EngineError as error:
            if self._router.states()[replica_id] is ReplicaState.SERVING:
                self._observe(replica_id, HealthEvent.REFUSED, reason=str(error))
            raise
        finally:
            self._router.finish(replica_id, tokens)

    async def _choose(self, request: GenerateRequest, tokens: int) -> str:
        """The replica for a request. Waits for one that serves, for at most the time limit."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_seconds
        self._start_refresh()
        while not self._router.is_serving():
            if loop.time() >= deadline:
                raise EngineError(
                    f"no replica serves session {request.session_id}: {self._router.describe()}, "
                    f"wanted one within {self._timeout_seconds:.0f} s"
                )
            await asyncio.sleep(_POLL_SECONDS)
            self._start_refresh()
        return self._router.choose(request.session_id, tokens)

    def _observe_silence(self, name: str) -> bool:
        """Records that a replica with open requests was silent. True when it now counts as dead."""
        return self._observe(name, HealthEvent.SILENT).state is ReplicaState.DEAD

    def _observe(self, name: str, event: HealthEvent, **facts: Any) -> ReplicaHealth:
        return self._set_health(name, observe(self._health[name], event, at=self._clock(), **facts))

    def _set_health(self, name: str, health: ReplicaHealth) -> ReplicaHealth:
        before, self._health[name] = self._health[name], health
        if before.state is not health.state:
            _logger.log(
                logging.INFO if health.state is ReplicaState.SERVING else logging.WARNING,
                "replica changed %s",
                fields(
                    replica=name, before=before.state, now=health.state, reason=health.reason or "-"
                ),
            )
            self._router.set_state(name, health.state)
        return health

    def _start_refresh(self) -> None:
        """Starts a check of the replicas unless all serve, one check at a time. Requests need not wait for it."""
        if self._refreshing is not None:
            if not self._refreshing.done():
                return
            ended, self._refreshing = self._refreshing, None
            ended.result()  # one caller sees an error of the last check
        now = asyncio.get_running_loop().time()
        is_whole = all(state is ReplicaState.SERVING for state in self._router.states().values())
        if not is_whole and now - self._refreshed_at >= _REFRESH_SECONDS:
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self.refresh_states())

    async def end_session(self, session_id: str) -> None:
        """Frees the KV cache of a finished conversation. Does not wait for the replica."""
        replica_id = self._router.end_session(session_id)
        if replica_id is not None:
            self._mailboxes[replica_id].end_session(session_id)

    async def close(self) -> None:
        """Stops listening to the replicas, which live on."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        for mailbox in self._mailboxes.values():
            await mailbox.close()

    async def follow(
        self, objects: ObjectStore, chain_id: str, version: int | None = None
    ) -> list[int | None]:
        """Binds every replica to a chain and applies a version (None: the newest), which it returns by replica."""
        calls = {
            name: actor.follow.remote(objects, chain_id, version)
            for name, actor in self._replicas.items()
        }
        return await self._change_all(calls, f"follow chain {chain_id}")

    async def update_to(self, version: int) -> list[SwapReport]:
        """Applies a version on every replica. Raises after all have answered. A failed one gets no requests."""
        calls = {name: actor.update_to.remote(version) for name, actor in self._replicas.items()}
        return await self._change_all(calls, f"update to version {version}")

    async def refresh_states(self) -> dict[str, ReplicaState]:
        """Asks every replica for its health. A recovered replica gets requests again. A replica without
        weights that knows its chain first applies the newest version.
        """
        await asyncio.gather(*(self._refresh_state(name) for name in self._replicas))
        return self._router.states()

    async def _refresh_state(self, name: str) -> None:
        """Asks one replica. A recovery that takes longer than the probe goes on; the next check asks again."""
        try:
            call = self._replicas[name].recover.remote()
            report = await self._probe(call, name, "recover")
        except EngineError:
            return  # _answer or _probe has recorded the failure
        health = observe_report(
            self._health[name],
            ReplicaState(report["state"]),
            at=self._clock(),
            process_id=report["process_id"],
            version=report["version"],
            reason=report["reason"],
        )
        self._set_health(name, health)

    def states(self) -> dict[str, ReplicaState]:
        """Last known state of every replica."""
        return self._router.states()

    def replica_status(self) -> dict[str, ReplicaStatus]:
        """Last known health of every replica, without a call."""
        return {
            name: ReplicaStatus(
                state=health.state.value,
                since=health.since,
                version=health.version,
                reason=health.reason,
            )
            for name, health in self._health.items()
        }

    async def health(self) -> dict[str, dict[str, str | int]]:
        """State, reason, version and process id by replica."""
        calls = {name: actor.health.remote() for name, actor in self._replicas.items()}
        return {name: await self._probe(call, name, "health") for name, call in calls.items()}

    async def statistics(self) -> dict[str, dict[str, float]]:
        """Running totals by replica."""
        calls = {name: actor.statistics.remote() for name, actor in self._replicas.items()}
        return {name: await self._probe(call, name, "statistics") for name, call in calls.items()}

    async def _probe(self, call: Awaitable[Any], name: str, what: str) -> Any:
        """The value of a call that a living replica answers in time. Silence is recorded against it."""
        pending = asyncio.ensure_future(self._answer(call, name, what))
        done, _ = await asyncio.wait({pending}, timeout=self._probe_seconds)
        if not done:
            pending.add_done_callback(lambda late: late.cancelled() or late.exception())
            self._observe(name, HealthEvent.SILENT, reason=f"{what} was not answered")
            raise EngineError(
                f"{what} failed, replica {name} is silent, wanted an answer "
                f"within {self._probe_seconds:.0f} s"
            )
        answer = pending.result()
        if name in self._health and self._health[name].state is ReplicaState.SUSPECT:
            self._observe(name, HealthEvent.ANSWERED)
        return answer

    async def _change_all(self, calls: Mapping[str, ray.ObjectRef], what: str) -> list:
        """Waits for a change of weights everywhere, then raises the first failure."""
        waiting = [self._answer(call, name, what) for name, call in calls.items()]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        failures = []
        for name, answer in zip(calls, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._observe_applied(name, answer)
                continue
            failures.append(answer)
            if self._health[name].state is not ReplicaState.DEAD:
                self._observe(name, HealthEvent.REFUSED, reason=f"{what}: {answer}")
        if failures:
            raise failures[0]
        return answers

    def _observe_applied(self, name: str, answer: SwapReport | int | None) -> None:
        """Records what a replica applied. `answer` None: the chain has no version."""
        version = answer.version if isinstance(answer, SwapReport) else answer
        if version is None:
            self._observe(name, HealthEvent.STARTED, reason="the chain has no version yet")
            return
        if self._health[name].state is ReplicaState.DEAD:  # a new process answered this call
            self._observe(name, HealthEvent.STARTED)
        self._observe(name, HealthEvent.VERIFIED, version=version)

    async def _answer(self, call: Awaitable[Any], replica_id: str, what: str) -> Any:
        """The value of a call. Our own errors pass; others, and a lost process, become EngineError."""
        try:
            return await call
        except RayTaskError as error:
            if isinstance(error.cause, (OstinatoError, ValueError)):
                raise error.cause from error
            raise EngineError(f"{what} failed on replica {replica_id}: {error.cause!r}") from error
        except RayError as error:
            self._observe(replica_id, HealthEvent.LOST, reason=f"{what}: {type(error).__name__}")
            raise EngineError(
                f"{what} failed, replica {replica_id} is gone: {type(error).__name__}"
            ) from error
