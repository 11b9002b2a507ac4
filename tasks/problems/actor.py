"""Provers as Ray actors, and the pool that hands them work.

`ProverPool` (actors, or one prover in this process), which worker gets which call, and calls made
again when a worker dies. A worker that has a repository warm gets that repository's calls first. It
knows nothing of what is proven.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from ostinato.infra.platform.cluster.actors import end_actor, get_or_create_actor
from ostinato.infra.platform.errors import ClusterError, OstinatoError
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.problems.prover import Prover
from ostinato.tasks.problems.set_config import ValidityRules

logger = logging.getLogger(__name__)

_RESTARTS = 20
_MOST_DEATHS = 5
_MOST_WAITS = 180  # of a pause each: a start took 20 s on a machine at load 13
_PAUSE_SECONDS = 1.0


@dataclass
class _Worker:
    """One place where calls run, one at a time."""

    name: str
    call: Callable[..., Awaitable[Any]]
    warm: list[Path] = field(default_factory=list)
    is_busy: bool = False


class ProverPool:
    """Runs a prover's methods on whichever worker is free. Belongs to one event loop."""

    def __init__(self, workers: list[_Worker], close: Callable[[], Awaitable[None]]) -> None:
        self._workers = workers
        self._close = close
        self._changed = asyncio.Condition()

    @classmethod
    def in_process(cls, rules: ValidityRules, seed: int) -> "ProverPool":
        """One prover on this event loop, without Ray."""
        prover = Prover(rules, seed)

        async def call(method: str, *arguments: object) -> Any:
            return await getattr(prover, method)(*arguments)

        return cls([_Worker("in-process", call)], prover.close)

    @classmethod
    def on_ray(cls, num_workers: int, run: str, rules: ValidityRules, seed: int) -> "ProverPool":
        """One actor a worker, named after the run; needs Ray started."""
        names = [f"prover-{run}-{number}" for number in range(num_workers)]
        actors = [
            get_or_create_actor(
                Prover, name, rules, seed, num_cpus=1.0, max_concurrency=2, max_restarts=_RESTARTS
            )
            for name in names
        ]
        workers = [
            _Worker(name, _caller(name, actor)) for name, actor in zip(names, actors, strict=True)
        ]

        async def close() -> None:
            for actor in actors:
                try:
                    await asyncio.wait_for(actor.close.remote(), 20.0)
                except (RayActorError, TimeoutError) as error:
                    logger.warning("prover did not close %s", fields(error=type(error).__name__))
                end_actor(actor)

        return cls(workers, close)

    @property
    def num_workers(self) -> int:
        """How many calls run at once."""
        return len(self._workers)

    async def run(self, method: str, directory: Path, *arguments: object) -> Any:
        """The result of a prover's method about a repository."""
        worker = await self._lease(directory)
        try:
            return await worker.call(method, directory, *arguments)
        finally:
            async with self._changed:
                worker.is_busy = False
                self._changed.notify_all()

    async def close(self) -> None:
        """End all workers and their boxes."""
        await self._close()

    async def _lease(self, directory: Path) -> _Worker:
        async with self._changed:
            while True:
                free = [worker for worker in self._workers if not worker.is_busy]
                if free:
                    worker = max(free, key=lambda one: (directory in one.warm, -len(one.warm)))
                    worker.is_busy = True
                    worker.warm = [*[p for p in worker.warm if p != directory], directory][-2:]
                    return worker
                await self._changed.wait()


def _caller(name: str, actor: ActorHandle) -> Callable[..., Awaitable[Any]]:
    async def call(method: str, *arguments: object) -> Any:
        num_waits, num_deaths = 0, 0
        while True:
            try:
                return await getattr(actor, method).remote(*arguments)
            except RayTaskError as error:
                if isinstance(error.cause, OstinatoError):
                    raise error.cause from error
                raise
            except RayActorError as error:
                # one that starts again says for all that time that it is unavailable
                num_deaths += not isinstance(error, ActorUnavailableError)
                num_waits += 1
                if num_waits > _MOST_WAITS or num_deaths >= _MOST_DEATHS:
                    raise ClusterError(
                        f"prover {name} died {num_deaths} times and was away {num_waits} times on "
                        f"{method} of {arguments[0]}: {error}"
                    ) from error
                logger.warning("prover is away %s", fields(worker=name, method=method))
                await asyncio.sleep(_PAUSE_SECONDS)

    return call
