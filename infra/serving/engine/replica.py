"""Engines as Ray actors that serve only weights they have verified.

`EngineReplica`: an asyncio actor around an engine that follows a weight chain. Versions are fetched
and verified in a thread while the engine decodes, and swapped in between two decode steps. A replica
that Ray restarts runs `__init__` again, so it starts without weights and serves only after a
verified apply. Each client has a mailbox, through which requests and answers pass in batches. The fleet,
which loads no engine, does the routing.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic, perf_counter

from ray.actor import ActorHandle
from torch import Tensor

from ostinato.infra.platform.cluster.actors import get_or_create_actor, live_nodes
from ostinato.infra.platform.cluster.mailbox import Outbox
from ostinato.infra.platform.errors import EngineError, OstinatoError, boundary
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.serving.engine.health import ReplicaState, SwapReport
from ostinato.infra.serving.engine.mailbox import GATHER_SECONDS, Answer
from ostinato.infra.serving.engine.start import Engine, start_engine
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.spec import ModelSpec

_logger = logging.getLogger(__name__)

_MAX_CONCURRENCY = 1000  # coroutines of one replica: waiting requests cost nothing
_RESTARTS = 5
_GONE_SECONDS = 3600.0  # a client that makes no call for this long is gone


class EngineReplica:
    """One engine that follows a weight chain. As an actor it needs max_concurrency for its requests."""

    def __init__(
        self,
        replica_id: str,
        spec: ModelSpec,
        config: EngineConfig,
        chain: tuple[ObjectStore, str] | None = None,
    ) -> None:
        """`chain`: store and id of the chain that it follows from the start, also after a restart by Ray."""
        self.replica_id = replica_id
        self._spec = spec
        self._config = config
        self._state = ReplicaState.STARTING
        self._reason = "no weights were applied yet"
        self._chain = chain
        self._subscriber = None if chain is None else ChainSubscriber(*chain, reader_id=replica_id)
        self._engine: Engine | None = None
        self._update_lock = asyncio.Lock()
        self._last_swap: SwapReport | None = None
        self._last_fetch_seconds = 0.0
        self._outboxes: dict[str, Outbox[Answer]] = {}
        self._called_at: dict[str, float] = {}  # by client
        self._answering: dict[str, asyncio.Task[None]] = {}

    async def follow(
        self, objects: ObjectStore, chain_id: str, version: int | None = None
    ) -> int | None:
        """Binds the replica to a chain and applies a version (None: the newest), which it returns."""
        async with self._update_lock:
            if self._subscriber is None or self._subscriber.chain_id != chain_id:
                self._subscriber = ChainSubscriber(objects, chain_id, reader_id=self.replica_id)
        if version is None:
            version = await asyncio.to_thread(self._subscriber.latest_version)
        if version is not None:
            await self.update_to(version)
        return version

    async def update_to(self, version: int) -> SwapReport:
        """Fetches, verifies and applies a version. A failure raises and leaves the replica STALE."""
        if self._subscriber is None:
            raise EngineError(
                f"replica {self.replica_id} follows no chain, "
                f"wanted follow() before update_to({version})"
            )
        async with self._update_lock:
            if (
                self._state is ReplicaState.SERVING
                and self._engine is not None
                and self._engine.version == version
            ):
                return self._last_swap or SwapReport(version, 0.0, 0.0)
            subscriber = self._subscriber
            try:
                report = await self._change_weights(partial(subscriber.fetch, version), version)
            except OstinatoError as error:
                await asyncio.to_thread(subscriber.refuse, version, str(error))
                raise
            await asyncio.to_thread(subscriber.acknowledge, version)
            return report

    async def _change_weights(
        self, fetch: Callable[[], Mapping[str, Tensor]], version: int
    ) -> SwapReport:
        try:
            with boundary(EngineError, f"replica {self.replica_id}, version {version}"):
                report = await self._fetch_and_apply(fetch, version)
        except OstinatoError as error:
            self._state = ReplicaState.STALE
            self._reason = f"update to version {version} failed: {error}"
            _logger.error(
                "replica is stale %s", fields(replica=self.replica_id, version=version, error=error)
            )
            raise
        self._state, self._reason, self._last_swap = ReplicaState.SERVING, "", report
        return report

    async def _fetch_and_apply(
        self, fetch: Callable[[], Mapping[str, Tensor]], version: int
    ) -> SwapReport:
        started_at = perf_counter()
        weights = await asyncio.to_thread(fetch)
        self._last_fetch_seconds = perf_counter() - started_at
        if self._engine is not None:
            return await self._engine.swap_weights(weights, version)
        started_at = perf_counter()
        self._engine = await asyncio.to_thread(
            start_engine, self._spec, weights, version, self._config, self.replica_id
        )
        return SwapReport(version, perf_counter() - started_at, 0.0)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer. EngineError while the replica does not serve."""
        if self._state is not ReplicaState.SERVING or self._engine is None:
            raise EngineError(
                f"replica {self.replica_id} is {self._state}: {self._reason}; wanted a serving one"
            )
        return await self._engine.generate(request)

    async def end_session(self, session_id: str) -> None:
        """Frees the KV cache of a finished conversation."""
        if self._engine is not None:
            await self._engine.end_session(session_id)

    async def recover(self) -> dict[str, str | int]:
        """Applies the newest version of the chain if the replica has no weights. Returns its health."""
        if self._state is ReplicaState.STARTING and self._chain is not None:
            try:
                await self.follow(*self._chain)
            except OstinatoError as error:
                _logger.error("no recovery %s", fields(replica=self.replica_id, error=error))
        return await self.health()

    async def health(self) -> dict[str, str | int]:
        """State, reason why it does not serve, served version (-1: none) and process id."""
        return {
            "replica_id": self.replica_id,
            "state": self._state.value,
            "reason": self._reason,
            "version": -1 if self._engine is None else self._engine.version,
            "process_id": os.getpid(),
        }

    async def statistics(self) -> dict[str, float]:
        """Totals of the engine and the last update's times. Empty before the first weights."""
        if self._engine is None:
            return {}
        numbers = self._engine.statistics() | {"last_fetch_seconds": self._last_fetch_seconds}
        if self._last_swap is not None:
            numbers["last_prepare_seconds"] = self._last_swap.prepare_seconds
            numbers["last_pause_seconds"] = self._last_swap.pause_seconds
        return numbers

    async def post(
        self,
        client_id: str,
        requests: Sequence[GenerateRequest],
        ended_sessions: Sequence[str],
        cancelled: Sequence[str] = (),
    ) -> None:
        """Starts new requests, stops cancelled ones and ends sessions. Does not wait for answers."""
        outbox = self._outbox(client_id)
        for request in requests:
            name = request.request_id
            task = self._answering[name] = asyncio.create_task(self._answer(request, outbox))
            task.add_done_callback(lambda _, name=name: self._answering.pop(name, None))
        for request_id in cancelled:
            if request_id in self._answering:
                self._answering[request_id].cancel()
        for session_id in ended_sessions:
            await self.end_session(session_id)

    async def collect(self, client_id: str) -> list[Answer]:
        """All answers that are ready. Waits a while for the first."""
        return await self._outbox(client_id).collect()

    async def _answer(self, request: GenerateRequest, outbox: Outbox[Answer]) -> None:
        name = request.request_id
        try:
            outbox.put((name, await self.generate(request), None))
        except (OstinatoError, ValueError) as error:
            outbox.put((name, None, error))
        except Exception as error:  # noqa: BLE001 - supervision: it must reach the caller
            text = f"request {name} failed on replica {self.replica_id}: {error!r}"
            outbox.put((name, None, EngineError(text)))

    def _outbox(self, client_id: str) -> Outbox[Answer]:
        """The client's outbox. Drops those of clients that are gone; a waiting client calls every few seconds."""
        now = self._called_at[client_id] = monotonic()
        for gone in [name for name, at in self._called_at.items() if now - at > _GONE_SECONDS]:
            del self._outboxes[gone], self._called_at[gone]
        return self._outboxes.setdefault(client_id, Outbox(GATHER_SECONDS))


def start_replicas(
    spec: ModelSpec,
    config: EngineConfig,
    replica_ids: list[str],
    *,
    num_cpus: float = 1.0,
    chain: tuple[ObjectStore, str] | None = None,
) -> dict[str, ActorHandle]:
    """Starts (or finds) one actor per id, on the machines of the cluster in turn. They serve after `EngineFleet.follow`.

    A replica whose process dies is started again without weights; with `chain` it then applies that
    chain's newest version by itself.
    """
    return {
        replica_id: get_or_create_actor(
            EngineReplica,
            replica_id,
            replica_id,
            spec,
            config,
            chain,
            num_cpus=num_cpus,
            num_gpus=config.gpus_per_replica,
            max_restarts=_RESTARTS,
            max_concurrency=_MAX_CONCURRENCY,
            on_node=node,
            is_movable=True,
        )
        for replica_id, node in zip(replica_ids, itertools.cycle(live_nodes()), strict=False)
    }
