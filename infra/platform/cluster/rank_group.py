"""Ranks of a trainer as actors of a Ray cluster, which all run the same calls at once.

When one rank is dead or silent, or fails alone, the whole group ends, because no rank can go on without the others;
the owner then starts a new group from the newest checkpoint. An error that all ranks raise leaves the group intact.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import RayError

from ostinato.infra.platform.cluster.placement import (
    bind_gloo_interface,
    rank_options,
    release_ranks,
    reserve_ranks,
)
from ostinato.infra.platform.cluster.processes import is_alive, kill_processes
from ostinato.infra.platform.cluster.ranks import forget_rank, mark_rank, marked_ranks
from ostinato.infra.platform.errors import ClusterError, OstinatoError, TrainingError, boundary
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.models.layout import ParallelLayout
from ostinato.models.process_groups import host_meeting, open_process_groups

Request = TypeVar("Request")
Answer = TypeVar("Answer")

COLLECTIVE_SECONDS = 600.0  # ranks differ by one microbatch
START_SECONDS = 600.0  # for the imports of a process; 8 s on an idle core
FAILURE_WAIT_SECONDS = 5.0  # ranks that lost a peer fail before Ray reports the lost rank


class RankActor:
    """One rank. Its calls return (answer, None, "") or (None, the error if it is typed, the traceback)."""

    def __init__(self, make: Callable[[int], Any], directory: Path, rank: int) -> None:
        configure_logging()
        mark_rank(directory, rank)
        self._make, self._rank = make, rank
        self._made: Any = None
        self._store: Any = None

    def host(self) -> tuple[str, None, str]:
        """Hosts the store in which all ranks meet, and returns its URL. Called on rank 0."""
        self._store, url = host_meeting(bind_gloo_interface())
        return url, None, ""

    def open(
        self, url: str, limit_seconds: float, layout: ParallelLayout, kind: Literal["cpu", "cuda"]
    ) -> tuple[None, OstinatoError | None, str]:
        """Opens process groups with the other ranks."""
        bind_gloo_interface()
        store = url if self._store is None else self._store
        return _attempt(
            lambda: open_process_groups(
                self._rank, layout.world_size, store, limit_seconds, layout=layout, kind=kind
            )
        )

    def call(self, method: Callable[..., Any], *arguments: Any) -> tuple[Any, Any, str]:
        """Runs a method of the object that `make` returns for this rank. The first call makes the object."""

        def work() -> Any:
            if self._made is None:
                self._made = self._make(self._rank)
            return method(self._made, *arguments)

        return _attempt(work)


class RankGroup:
    """The ranks of a trainer, as their owner calls them. Used by one thread at a time."""

    def __init__(
        self,
        name: str,
        make: Callable[[int], Any],
        directory: Path,
        layout: ParallelLayout,
        kind: Literal["cpu", "cuda"],
        options: Sequence[dict[str, Any]],
        collective_seconds: float = COLLECTIVE_SECONDS,
    ) -> None:
        """Starts an actor for each rank, with its `options`, and opens process groups between them. Their processes
        are marked in `directory`.
        """
        self._name = f"the trainer of {name}, {layout.world_size} ranks"
        self._directory = directory
        self._ended = ""
        actor: Any = ray.remote(RankActor)
        self._ranks = [
            actor.options(**own).remote(make, directory, rank) for rank, own in enumerate(options)
        ]
        with self._all_or_none():
            url = self._gather("start", [self._ranks[0].host.remote()], START_SECONDS)[0]
            given = (url, collective_seconds, layout, kind)
            opened = [rank.open.remote(*given) for rank in self._ranks]
            self._gather("open process groups", opened, START_SECONDS)

    def call(
        self, method: Callable[..., Answer], *arguments: Any, limit_seconds: float | None
    ) -> Answer:
        """The first rank's answer. All ranks run the method, with the same arguments."""
        if self._ended:
            raise ClusterError(f"{self._name}: it takes no more calls, {self._ended}")
        given = [ray.put(argument) for argument in arguments]
        with self._all_or_none():
            asked = [rank.call.remote(method, *given) for rank in self._ranks]
            answers = self._gather(method.__name__, asked, limit_seconds)
        if isinstance(answers[0], OstinatoError):
            raise answers[0]
        return answers[0]

    def close(self) -> None:
        """Ends the actors, even during a call, and removes the marks of their processes."""
        self.end("it was closed")
        for rank in marked_ranks(self._directory):
            forget_rank(self._directory, rank)

    def end(self, reason: str) -> None:
        """Ends the actors. The marks of their processes stay."""
        self._ended = self._ended or reason
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)
        if ranks:  # a stopped process does not react to Ray's kill
            marks = marked_ranks(self._directory).values()
            kill_processes([mark.pid for mark in marks if is_alive(mark)])

    def _gather(self, what: str, asked: Sequence[Any], limit_seconds: float | None) -> list[Any]:
        """Answers by rank. If all ranks raise typed errors, these errors in order of arrival.

        The first failure shortens the wait for the others. A lost rank is reported before other failures, which are
        its consequence.
        """
        waiting = {reference: rank for rank, reference in enumerate(asked)}
        answers: dict[int, Any] = {}
        lost: list[str] = []
        failures: dict[int, tuple[OstinatoError | None, str]] = {}
        deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), timeout=left)
            if not ready:
                break
            rank = waiting.pop(ready[0])
            try:
                answers[rank], error, trace = ray.get(ready[0])
            except RayError as gone:
                lost.append(f"rank {rank} was lost at {what!r}: {type(gone).__name__}: {gone}")
            else:
                if trace:
                    failures[rank] = error, trace
            if (lost or failures) and (len(lost) + len(failures) == 1):
                deadline = time.monotonic() + FAILURE_WAIT_SECONDS
        if lost:
            raise ClusterError(f"{self._name}: {lost[0]}")
        if len(failures) == len(asked) and all(error for error, _ in failures.values()):
            return [error for error, _ in failures.values()]
        for rank, (error, trace) in failures.items():
            raise error or ClusterError(f"{self._name}: rank {rank} failed at {what!r}: {trace}")
        if waiting:
            raise ClusterError(
                f"{self._name}: ranks {sorted(waiting.values())} gave no answer to {what!r} within {limit_seconds:.0f} s"
            )
        return [answers[rank] for rank in sorted(answers)]

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Ends all ranks when the block raises."""
        try:
            yield
        except BaseException as error:
            self.end(str(error) or "it was interrupted")
            raise


def run_rank_actors(
    function: Callable[[Request, int], Answer],
    request: Request,
    directory: Path,
    layout: ParallelLayout,
    kind: Literal["cpu", "cuda"],
) -> Answer:
    """Rank 0's answer to `function(request, rank)`, run in actors. ClusterError when a rank is lost."""
    placement = reserve_ranks(layout.world_size, kind)
    try:
        options = [rank_options(placement, rank) for rank in range(layout.world_size)]
        group = RankGroup(directory.name, int, directory, layout, kind, options)
        try:
            return group.call(_run, function, request, limit_seconds=None)
        finally:
            group.end("its function has ended")
    finally:
        release_ranks(placement)


def _run(rank: int, function: Callable[[Request, int], Answer], request: Request) -> Answer:
    with boundary(TrainingError, f"rank {rank}"):
        return function(request, rank)


def _attempt(work: Callable[[], Any]) -> tuple[Any, OstinatoError | None, str]:
    try:
        return work(), None, ""
    except OstinatoError as error:
        return None, error, traceback.format_exc(limit=-3)
    except Exception:  # noqa: BLE001 - the owner must learn of any failure of a rank
        return None, None, traceback.format_exc(limit=-3)
