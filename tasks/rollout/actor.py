"""Rollout workers as Ray actors, and the client that hands them attempts in batches.

Batching pays Ray's overhead once per batch instead of once per attempt. When a worker process dies,
its attempts end as sandbox_failed and Ray restarts it.
"""

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from ostinato.infra.platform.cluster.actors import end_actor, get_or_create_actor, live_nodes
from ostinato.infra.platform.cluster.mailbox import Deliveries, Flush, Outbox
from ostinato.infra.platform.cluster.stage_status import BoxUse
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.test_server import as_text
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.payload import trajectory_from_bytes, trajectory_to_bytes
from ostinato.tasks.rollout.records import AttemptRequest

if TYPE_CHECKING:  # the run's driver does not import the code that grades and opens boxes
    from ostinato.tasks.rollout.worker import RolloutWorker

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.02  # time over which finished trajectories are collected into one answer
START_SECONDS = 180.0
BOX_USE_SECONDS = 5.0  # a worker that does not report its boxes within this is left out
RESTARTS = 5
MAX_CONCURRENCY = 16  # calls at a time: submits, one collect, statistics

BuildWorker = Callable[[], "RolloutWorker"]
Finished = tuple[str, bytes]  # id and record


class RolloutActor:
    """A rollout worker. `start_workers` makes it an actor."""

    def __init__(self, build_worker: BuildWorker) -> None:
        self._worker = build_worker()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: Outbox[Finished] = Outbox(GATHER_SECONDS)

    async def ready(self) -> None:
        """Returns when the worker is built. An error of its construction reaches the caller."""

    async def submit(self, requests: Sequence[AttemptRequest]) -> None:
        """Starts attempts and returns at once."""
        for request in requests:
            task = asyncio.create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def collect(self) -> list[Finished]:
        """Attempts that ended since the last call. Waits a limited time for the first."""
        return await self._finished.collect()

    async def boxes(self) -> BoxUse:
        """Boxes that its attempts use or wait for now."""
        return self._worker.boxes()

    async def close(self) -> None:
        """Cancels attempts in flight and ends the boxes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._worker.close()

    async def _run(self, request: AttemptRequest) -> None:
        try:
            data = trajectory_to_bytes(await self._worker.attempt(request))
        except Exception as error:  # noqa: BLE001 - the orchestrator waits for a record of every attempt
            reason = as_text(f"fault: {type(error).__name__}: {error}")
            logger.error("%s %s", reason, fields(trajectory=request.trajectory_id))
            data = trajectory_to_bytes(request.lost(reason, time.time()))
        self._finished.put((request.trajectory_id, data))


def start_workers(names: Sequence[str], build_worker: BuildWorker) -> dict[str, ActorHandle]:
    """Starts one rollout worker per name, round-robin over the machines of the cluster. It begins with the last
    machine, because engine replicas begin with this one.
    """
    machines = itertools.cycle(reversed(live_nodes()))
    return {
        name: get_or_create_actor(
            RolloutActor,
            name,
            build_worker,
            num_cpus=0.0,
            max_concurrency=MAX_CONCURRENCY,
            max_restarts=RESTARTS,
            on_node=machine,
            is_movable=True,
        )
        for name, machine in zip(names, machines, strict=False)
    }


class RolloutFleet:
    """Client that sends attempts to the least busy worker. It belongs to the event loop in which it is opened."""

    def __init__(self, workers: Mapping[str, ActorHandle], clock: Callable[[], float]) -> None:
        self._workers = dict(workers)
        self._clock = clock
        self._outbox: dict[str, list[AttemptRequest]] = {name: [] for name in workers}
        self._waiting: dict[str, dict[str, tuple[AttemptRequest, asyncio.Future[Trajectory]]]] = {
            name: {} for name in workers
        }
        self._flush = Flush(self._send)
        self._deliveries = Deliveries()
        self._pumps: list[asyncio.Task[None]] = []
        self._failure: str | None = None

    async def open(self) -> None:
        """Waits for the workers and starts collecting. ClusterError if a worker does not start."""
        for name, worker in self._workers.items():
            try:
                await asyncio.wait_for(_await(worker.ready.remote()), START_SECONDS)
            except (RayActorError, TimeoutError) as error:
                raise ClusterError(f"rollout worker {name} did not start: {error!r}") from error
        self._pumps = [asyncio.create_task(self._pump(name)) for name in self._workers]

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        """Runs one attempt on the least busy worker."""
        if self._failure is not None:
            raise ClusterError(self._failure)
        name = min(self._waiting, key=lambda worker: len(self._waiting[worker]))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Trajectory] = loop.create_future()
        self._waiting[name][request.trajectory_id] = (request, future)
        self._outbox[name].append(request)
        self._flush.plan()
        return await future

    async def boxes(self) -> BoxUse:
        """Sum of the boxes of all workers that answer."""
        calls = [_await(worker.boxes.remote()) for worker in self._workers.values()]
        limited = [asyncio.wait_for(call, BOX_USE_SECONDS) for call in calls]
        answers = await asyncio.gather(*limited, return_exceptions=True)
        uses = [answer for answer in answers if isinstance(answer, BoxUse)]
        since = [use.waiting_since for use in uses if use.waiting_since is not None]
        return BoxUse(
            leased=sum(use.leased for use in uses),
            waiting=sum(use.waiting for use in uses),
            waiting_since=min(since, default=None),
        )

    async def close(self) -> None:
        """Ends all workers and their boxes."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for name, worker in self._workers.items():
            try:
                await asyncio.wait_for(_await(worker.close.remote()), timeout=10.0)
            except (RayActorError, RayTaskError, TimeoutError) as error:
                logger.warning("worker did not close %s", fields(worker=name, error=repr(error)))
            end_actor(worker)

    def _send(self) -> None:
        for name, requests in self._outbox.items():
            if requests:
                call = self._workers[name].submit.remote(requests)
                names = [request.trajectory_id for request in requests]
                self._deliveries.watch(call, functools.partial(self._fail_attempts, name, names))
                self._outbox[name] = []

    async def _pump(self, name: str) -> None:
        deaths = 0
        while True:
            try:
                finished = await _await(self._workers[name].collect.remote())
            except RayActorError as error:
                deaths += not isinstance(error, ActorUnavailableError)  # such an actor may return
                self._fail_attempts(name, list(self._waiting[name]), error)
                logger.error(
                    "worker died %s", fields(worker=name, deaths=deaths, error=repr(error))
                )
                if deaths > RESTARTS:
                    self._give_up(f"rollout worker {name} died {deaths} times: {error}")
                    return
                await asyncio.sleep(1.0)
            except RayTaskError as error:
                self._give_up(f"rollout worker {name} failed to collect: {error}")
                return
            else:
                self._deliver(name, finished)

    def _deliver(self, name: str, finished: Sequence[Finished]) -> None:
        for trajectory_id, data in finished:
            known = self._waiting[name].pop(trajectory_id, None)
            if known is None or known[1].done():
                continue  # cancelled, or started before the worker's restart
            try:
                trajectory = trajectory_from_bytes(data)
            except Exception as error:  # an unreadable record must not lose the others
                logger.exception("unreadable record %s", fields(trajectory=trajectory_id))
                reason = f"fault: {type(error).__name__}: {error}"
                trajectory = known[0].lost(reason, self._clock())
            known[1].set_result(trajectory)

    def _fail_attempts(self, name: str, trajectory_ids: Sequence[str], error: RayError) -> None:
        reason = f"rollout worker {name} died: {type(error).__name__}"
        for trajectory_id in trajectory_ids:
            known = self._waiting[name].pop(trajectory_id, None)
            if known is not None and not known[1].done():
                known[1].set_result(known[0].lost(reason, self._clock()))

    def _give_up(self, reason: str) -> None:
        self._failure = reason
        for waiting in self._waiting.values():
            for _, future in waiting.values():
                if not future.done():
                    future.set_exception(ClusterError(reason))


async def _await(reference: Any) -> Any:
    return await reference
