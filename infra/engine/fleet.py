"""Several engine replicas as one `ModelClient`.

Owns `EngineFleet` (client side: routing, error translation, updates of all replicas) and
`start_replicas` (making the actors). Any number of processes may each hold a fleet over the same
actors. Enters: requests. Leaves: generations. A request whose replica died raises EngineError and
is not repeated here: who asked knows whether a repeat is safe.
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from infra.cluster.actors import get_or_create_actor
from infra.engine.local import SwapReport
from infra.engine.mailbox import Mailbox, MailboxReplica
from infra.engine.router import RequestRouter
from infra.engine.states import ReplicaState
from infra.engine.wire import decode_generation, encode_request
from infra.errors import EngineError, OstinatoError
from infra.objects import ObjectStore
from infra.telemetry import fields
from models.decode.engine import EngineConfig
from models.decode.protocol import GenerateRequest, Generation
from models.spec import ModelSpec

_logger = logging.getLogger(__name__)

_MAX_CONCURRENCY = 1000  # coroutines of one replica: waiting requests cost nothing
_RESTARTS = 5
_PATIENCE_SECONDS = 180.0  # a request waits this long for a serving replica; a restart takes 10
_REFRESH_SECONDS = 1.0


def start_replicas(
    spec: ModelSpec,
    config: EngineConfig,
    replica_ids: list[str],
    *,
    num_cpus: float = 1.0,
    chain: tuple[ObjectStore, str] | None = None,
) -> dict[str, ActorHandle]:
    """Starts (or finds) one actor per id; they serve after `EngineFleet.follow`.

    A replica whose process dies is started again without weights; with `chain` it then applies that
    chain's newest version by itself.
    """
    return {
        replica_id: get_or_create_actor(
            MailboxReplica,
            replica_id,
            replica_id,
            spec,
            config,
            chain,
            num_cpus=num_cpus,
            max_restarts=_RESTARTS,
            max_concurrency=_MAX_CONCURRENCY,
        )
        for replica_id in replica_ids
    }


class EngineFleet:
    """A `ModelClient` over replicas."""

    def __init__(
        self,
        replicas: Mapping[str, ActorHandle],
        *,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._refreshed_at = float("-inf")
        self._replicas = dict(replicas)
        self._router = RequestRouter(list(replicas), state=ReplicaState.STARTING)
        self._mailboxes = {name: Mailbox(name, actor) for name, actor in replicas.items()}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer on the replica that holds the session, or the least busy one."""
        tokens = len(request.token_ids) + request.max_new_tokens
        replica_id = await self._choose(request.session_id, tokens)
        try:
            call = self._mailboxes[replica_id].generate(encode_request(request))
            return decode_generation(
                await self._answer(call, replica_id, f"request {request.request_id}")
            )
        except EngineError:
            if self._router.states()[replica_id] is ReplicaState.SERVING:
                self._router.set_state(replica_id, ReplicaState.STALE)
            raise
        finally:
            self._router.finish(replica_id, tokens)

    async def _choose(self, session_id: str, tokens: int) -> str:
        """A serving replica; waits for a while when none serves."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_seconds
        if not all(state is ReplicaState.SERVING for state in self._router.states().values()):
            await self._refresh_when_due()
        while True:
            try:
                return self._router.choose(session_id, tokens)
            except EngineError:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(_REFRESH_SECONDS)
            await self._refresh_when_due()

    async def _refresh_when_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._refreshed_at >= _REFRESH_SECONDS:
            self._refreshed_at = now
            await self.refresh_states()

    async def end_session(self, session_id: str) -> None:
        """Lets the cache of a finished conversation go; nobody waits for it."""
        replica_id = self._router.end_session(session_id)
        if replica_id is not None:
            self._mailboxes[replica_id].end_session(session_id)

    async def close(self) -> None:
        """Stops listening to the replicas; they live on."""
        for mailbox in self._mailboxes.values():
            await mailbox.close()

    async def follow(self, objects: ObjectStore, chain_id: str) -> list[int | None]:
        """Binds every replica to a chain; returns the version each applied."""
        calls = {
            name: actor.follow.remote(objects, chain_id) for name, actor in self._replicas.items()
        }
        return await self._change_all(calls, f"follow chain {chain_id}")

    async def load_checkpoint(self, directory: str, version: int) -> list[SwapReport]:
        """Serves a checkpoint directory everywhere as `version`."""
        calls = {
            name: actor.load_checkpoint.remote(directory, version)
            for name, actor in self._replicas.items()
        }
        return await self._change_all(calls, f"load checkpoint {directory}")

    async def update_to(self, version: int) -> list[SwapReport]:
        """Applies a version everywhere. One failure raises after all have answered; that replica
        gets no requests.
        """
        calls = {name: actor.update_to.remote(version) for name, actor in self._replicas.items()}
        return await self._change_all(calls, f"update to version {version}")

    async def refresh_states(self) -> dict[str, ReplicaState]:
        """Asks every replica how it is; one that recovered gets requests again. A replica that has
        no weights and knows its chain applies the newest version first.
        """
        await asyncio.gather(*(self._refresh_state(name) for name in self._replicas))
        return self._router.states()

    async def _refresh_state(self, name: str) -> None:
        try:
            health = await self._answer(self._replicas[name].recover.remote(), name, "recover")
        except EngineError:
            return  # its state was noted by _answer
        self._router.set_state(name, ReplicaState(health["state"]))

    def states(self) -> dict[str, ReplicaState]:
        """What this client last knew of every replica."""
        return self._router.states()

    async def health(self) -> dict[str, dict[str, str | int]]:
        """State, reason, version and process id by replica."""
        calls = {name: actor.health.remote() for name, actor in self._replicas.items()}
        return {name: await self._answer(call, name, "health") for name, call in calls.items()}

    async def statistics(self) -> dict[str, dict[str, float]]:
        """Running totals by replica."""
        calls = {name: actor.statistics.remote() for name, actor in self._replicas.items()}
        return {name: await self._answer(call, name, "statistics") for name, call in calls.items()}

    async def _change_all(self, calls: Mapping[str, ray.ObjectRef], what: str) -> list:
        """Waits for a change of weights everywhere, notes who serves afterwards, then raises the
        first failure.
        """
        waiting = [self._answer(call, name, what) for name, call in calls.items()]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        failures = []
        for name, answer in zip(calls, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._router.set_state(name, ReplicaState.SERVING)
                continue
            failures.append(answer)
            if self._router.states()[name] is not ReplicaState.DEAD:
                self._router.set_state(name, ReplicaState.STALE)
        if failures:
            raise failures[0]
        return answers

    async def _answer(self, call: Awaitable[Any], replica_id: str, what: str) -> Any:
        """The value of a call; errors of the method pass, a lost process becomes EngineError."""
        try:
            return await call
        except RayTaskError as error:
            if isinstance(error.cause, (OstinatoError, ValueError)):
                raise error.cause from error
            raise EngineError(f"{what} failed on replica {replica_id}: {error.cause!r}") from error
        except RayError as error:
            if self._router.states()[replica_id] is not ReplicaState.DEAD:
                self._router.set_state(replica_id, ReplicaState.DEAD)
                _logger.error(
                    "replica is dead %s",
                    fields(replica=replica_id, what=what, error=type(error).__name__),
                )
            raise EngineError(
                f"{what} failed, replica {replica_id} is gone: {type(error).__name__}"
            ) from error
