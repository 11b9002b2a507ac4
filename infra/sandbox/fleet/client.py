"""Client of a sandbox fleet on Ray: chooses a node for each box and renews its leases.

When a client dies, its leases are no longer renewed, and the nodes end its boxes.
"""

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ostinato.infra.platform.cluster.actors import ask, end_actor, get_or_create_actor, live_nodes
from ostinato.infra.platform.errors import (
    ClusterError,
    InvalidArgument,
    OstinatoError,
    OutOfMemory,
    SandboxError,
    SandboxHostLost,
    SandboxLost,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.node import BoxNode, NodeLoad
from ostinato.infra.sandbox.host.tools import Blobs, BoxTools, Reply
from ostinato.infra.sandbox.protocol import SandboxKind, SandboxLimits, Snapshot, SnapshotKind
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)
_START_SECONDS = 120.0
_END_SECONDS = 30.0
_MAX_CONCURRENCY = 10_000  # coroutines of one actor; waiting ones cost nothing
_RENEWALS_PER_LEASE = 3
_NUM_CANDIDATES = 8  # nodes whose load is queried for each box
_LOAD_SECONDS = 10.0
_WAIT_SECONDS = 120.0


class _NodeChannel:
    """Requests to a box through its node."""

    def __init__(self, name: str, node: ActorHandle) -> None:
        self.name = name
        self._node = node
        self._lost: SandboxError | None = None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def lose(self, error: SandboxError) -> None:
        """Records why the box is gone. The first reason stays."""
        self._lost = self._lost or error

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> Reply:
        return await self.call("request", operation, answer_seconds, blobs, **fields)

    async def call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        try:
            reference = self._node.call.remote(self.name, operation, *arguments, **named)
            return await _answer(reference, f"{operation} in {self.name}")
        except (SandboxLost, OutOfMemory) as error:
            self.lose(error)
            raise
        except ClusterError as error:
            gone = SandboxHostLost(f"box {self.name}: its node is gone: {error}")
            self.lose(gone)
            raise gone from error


class LeasedBox(BoxTools):
    """A leased box on a node of the fleet. Unusable after SandboxLost."""

    def __init__(
        self,
        lease_id: str,
        node_name: str,
        node: ActorHandle,
        release: Callable[["LeasedBox"], Awaitable[None]],
    ) -> None:
        self._channel = _NodeChannel(lease_id, node)
        super().__init__(self._channel)
        self.sandbox_id = lease_id
        self.node_name = node_name
        self._release = release

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Files that differ from the repository. None: removed."""
        if base is not None:
            raise InvalidArgument(f"diff of {self.sandbox_id} from {base}: a fleet keeps none")
        return await self._channel.call("diff")

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """Raises InvalidArgument: a snapshot could not leave the node of the box."""
        raise InvalidArgument(f"snapshot {kind} of {self.sandbox_id}: a fleet keeps none")

    async def close(self) -> None:
        """Releases the lease, which ends the box."""
        await self._release(self)

    def lose(self) -> None:
        """Records that the lease has ended."""
        self._channel.lose(SandboxHostLost(f"box {self.sandbox_id}: its lease has ended"))


class FleetClient:
    """Leases of one client process on boxes of one fleet. Belongs to one event loop."""

    def __init__(self, fleet_name: str, *, lease_seconds: float = 60.0) -> None:
        self._fleet_name = fleet_name
        self._lease_seconds = lease_seconds
        self._nodes: dict[str, ActorHandle] = {}
        self._requested: Counter[str] = Counter()  # by node: own requests that have no box yet
        self._live: dict[str, LeasedBox] = {}
        self._numbers = itertools.count(1)
        self._renewing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def leased(
        self, repository: PreparedRepository, files: Mapping[str, bytes | None]
    ) -> AsyncIterator[LeasedBox]:
        """A clean box with `files` written over the repository, for the duration of a `with` block.
        Raises CapacityExhausted when none became free in time, SandboxLost when the fleet is gone.
        """
        box = await self.acquire(repository.name)
        try:
            await box.write_files(files)
            yield box
        finally:
            await self.release(box)

    async def acquire(self, repository: str) -> LeasedBox:
        """A new box of a repository, to be ended with `release`."""
        # Unique to this process, so that a restarted client does not get the boxes of its predecessor.
        client_id = ray.get_runtime_context().get_worker_id()
        lease_id = f"{client_id}/{next(self._numbers)}"
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        try:
            name = await self._choose_node()
            node = self._nodes[name]
            self._requested[name] += 1
            try:
                reference = node.acquire.remote(
                    lease_id, repository, self._lease_seconds, _WAIT_SECONDS
                )
                await _answer(reference, f"request {lease_id} to {name}")
            except asyncio.CancelledError:
                node.release.remote(lease_id)  # the caller no longer waits
                raise
            finally:
                self._requested[name] -= 1
        except ClusterError as error:
            raise SandboxLost(f"fleet {self._fleet_name} provides no box: {error}") from error
        box = self._live[lease_id] = LeasedBox(lease_id, name, node, self.release)
        return box

    async def release(self, box: LeasedBox) -> None:
        """Ends a lease and its box. If the node is gone, so is the box."""
        self._live.pop(box.sandbox_id, None)
        try:
            reference = self._nodes[box.node_name].release.remote(box.sandbox_id)
            await _answer(reference, f"lease {box.sandbox_id}")
        except Exception as error:  # noqa: BLE001 - the node ends the box when the lease expires
            _logger.warning("box not released %s", fields(box=box.sandbox_id, error=str(error)))

    async def close(self) -> None:
        """Releases all boxes."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        for box in list(self._live.values()):
            await self.release(box)

    async def _choose_node(self) -> str:
        """The least loaded of a few randomly drawn nodes. Raises SandboxLost if the fleet has none."""
        names = ray.util.list_named_actors()
        alive = [name for name in names if name.startswith(f"{self._fleet_name}-machine")]
        if not alive:
            raise SandboxLost(f"{self._fleet_name} is not registered, wanted a live sandbox fleet")
        drawn = random.sample(alive, min(_NUM_CANDIDATES, len(alive)))
        answers = await asyncio.gather(*map(self._ask_load, drawn), return_exceptions=True)
        scores = {
            name: answer.score(self._requested[name])
            for name, answer in zip(drawn, answers, strict=True)
            if isinstance(answer, NodeLoad)
        }
        if not scores:
            raise ClusterError(f"none of {len(drawn)} nodes reported its load: {answers[0]}")
        return min(scores, key=scores.__getitem__)

    async def _ask_load(self, name: str) -> NodeLoad:
        if name not in self._nodes:
            self._nodes[name] = ray.get_actor(name)  # ValueError: ended since it was listed
        async with asyncio.timeout(_LOAD_SECONDS):
            return await _answer(self._nodes[name].load.remote(), f"load of {name}")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / _RENEWALS_PER_LEASE)
            for name in {box.node_name for box in self._live.values()}:
                leases = [lease for lease, box in self._live.items() if box.node_name == name]
                try:
                    renewal = self._nodes[name].renew.remote(leases)
                    ended = await _answer(renewal, f"renewal by {name}")
                except ClusterError as error:  # once restarted, the node reports them as ended
                    _logger.info("renewal failed %s", fields(node=name, error=str(error)))
                    continue
                except Exception:  # the loop must go on, or every lease would expire
                    _logger.exception("renewal failed %s", fields(node=name))
                    continue
                for lease_id in ended:
                    box = self._live.pop(lease_id, None)
                    if box is not None:
                        box.lose()


async def _answer(reference: Any, what: str) -> Any:
    """The value of a call on a node. Errors of Ray become ClusterError; errors of the node stay as they are."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, OstinatoError):
            raise error.cause from error
        raise
    except RayError as error:
        raise ClusterError(f"{what} failed: {type(error).__name__}: {error}") from error


def start_node(
    fleet_name: str,
    machine: str,
    index: int,
    repositories: Iterable[PreparedRepository],
    limits: SandboxLimits,
    kind: SandboxKind = SandboxKind.NAMESPACE,
    max_boxes: int | None = None,
) -> ActorHandle:
    """The fleet's node on the machine with this Ray id, found or started. When its process dies, its boxes die
    too, and Ray restarts it without boxes.
    """
    return get_or_create_actor(
        BoxNode,
        f"{fleet_name}-machine{index}",
        {repository.name: repository for repository in repositories},
        limits,
        kind,
        max_boxes,
        max_concurrency=_MAX_CONCURRENCY,
        max_restarts=-1,
        on_node=machine,
    )


class RepositoryFleet:
    """A running fleet, from the side of its owner."""

    def __init__(self, name: str, nodes: Iterable[ActorHandle]) -> None:
        self.name = name
        self._nodes = tuple(nodes)

    @classmethod
    async def start(
        cls,
        name: str,
        repositories: Iterable[PreparedRepository],
        limits: SandboxLimits,
        kind: SandboxKind = SandboxKind.NAMESPACE,
    ) -> "RepositoryFleet":
        """Starts a node on every machine of the cluster and waits until each answers."""
        repositories = tuple(repositories)
        nodes = [
            start_node(name, machine, index, repositories, limits, kind)
            for index, machine in enumerate(live_nodes())
        ]
        loads = [ask(node.load.remote(), f"a node of {name}", _START_SECONDS) for node in nodes]
        await asyncio.gather(*loads)
        return cls(name, nodes)

    async def close(self) -> None:
        """Ends the nodes and their boxes."""
        for node in self._nodes:
            try:
                await ask(node.close.remote(), f"end of a node of {self.name}", _END_SECONDS)
            except ClusterError as error:  # its boxes end with its process
                _logger.info("node did not end %s", fields(fleet=self.name, error=repr(error)))
            end_actor(node)
