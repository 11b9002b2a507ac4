"""The other ranks of a trainer, as rank 0 starts, calls and ends them: Ray actors that live as long
as it does.

A rank of a `RankGroup` that is dead, silent or in error takes the whole group with it: no rank can go
on without the others, and the owner starts anew from the newest step checkpoint. Every wait has a
deadline.
"""

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from ostinato.infra.platform.cluster.actors import wait_for
from ostinato.infra.platform.cluster.placement import Room, meet_here, rank_options
from ostinato.infra.platform.cluster.processes import is_alive, kill_processes
from ostinato.infra.platform.cluster.ranks import forget_rank, mark_rank, marked_ranks
from ostinato.infra.platform.errors import ClusterError, OstinatoError, StorageError
from ostinato.models.device import DeviceKind
from ostinato.models.layout import ParallelLayout
from ostinato.models.process_groups import close_process_groups, host_meeting, open_process_groups

Rank = TypeVar("Rank")
Argument = TypeVar("Argument")
Answer = TypeVar("Answer")
Own = TypeVar("Own")

PATIENCE_SECONDS = 600.0  # of a collective, and for an answer: ranks differ by one microbatch
START_SECONDS = 600.0  # until a process has imported what it needs; 8 s on an idle core
LAST_WORDS_SECONDS = 5.0  # a rank that fails says why before its connections break
WATCH_SECONDS = 60.0  # for the answer of has_failed_upload, which runs beside a step


class RankActor:
    """One of the other ranks. `start`, `open` and `run` return (True, answer) or (False, traceback)."""

    def __init__(self, make_rank: Callable[[int], Any], directory: Path, rank: int) -> None:
        self._make_rank, self._rank = make_rank, rank
        self._own: Any = None
        mark_rank(directory, rank)

    def start(self) -> tuple[bool, None]:
        """Answers once the process has imported what it needs."""
        return True, None

    def open(
        self, url: str, patience_seconds: float, layout: ParallelLayout, kind: DeviceKind
    ) -> tuple[bool, Any]:
        """Meets the other ranks in process groups."""
        meet_here()
        return _answer(
            lambda: open_process_groups(
                self._rank, layout.world_size, url, patience_seconds, layout=layout, kind=kind
            )
        )

    def run(self, method: Callable[..., Any], argument: Any) -> tuple[bool, Any]:
        """Runs a method of the rank. The first call makes the rank."""

        def work() -> Any:
            if self._own is None:
                self._own = self._make_rank(self._rank)
            return method(self._own, argument)

        return _answer(work)

    @ray.method(concurrency_group="watch")
    def has_failed_upload(self) -> bool:
        """Whether its last shard could not be uploaded. Answered beside `run`."""
        return self._own is not None and self._own.has_failed_upload


class RankGroup:
    """The other ranks as rank 0 sees them. In a world of 1 there are none. Used by one thread at a time."""

    def __init__(
        self,
        name: str,
        make_rank: Callable[[int], Any],
        directory: Path,
        layout: ParallelLayout,
        kind: DeviceKind,
        room: Room | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Starts the actors in `room`, whose first bundle is this process's own, and opens process groups with
        them. Groups this process had open are closed. `make_rank` makes each in its process.
        """
        self._name = f"the trainer of {name}, {layout.world_size} ranks"
        self._patience_seconds = patience_seconds
        self._others: list[Any] = []
        self._ended = ""
        self._directory = directory
        self._world_size = world_size = layout.world_size
        mark_rank(directory, 0)
        if world_size == 1:
            open_process_groups(kind=kind)
            return
        if room is None:
            raise ClusterError(f"{self._name}: room is None, wanted a placement group for them")
        close_process_groups()
        with self._all_or_none():
            remote: Any = ray.remote
            actor = remote(concurrency_groups={"watch": 1})(RankActor)
            for rank in range(1, world_size):
                placed = actor.options(**rank_options(room, rank))
                self._others.append(placed.remote(make_rank, directory, rank))
            self._gather("start", [o.start.remote() for o in self._others], START_SECONDS)
            store, url = host_meeting(meet_here())
            opening = [o.open.remote(url, patience_seconds, layout, kind) for o in self._others]
            self._together(
                "open process groups",
                opening,
                lambda: open_process_groups(
                    0, world_size, store, patience_seconds, layout=layout, kind=kind
                ),
            )

    def run(
        self,
        own: Rank,
        method: Callable[[Rank, Argument], Answer],
        arguments: Sequence[Argument],
    ) -> list[Answer]:
        """Runs the method on every rank, of which `own` is the first. Each has its own argument."""
        mine = functools.partial(method, own, arguments[0])
        answer, others = self._order(method, arguments[1:], mine)
        return [answer, *others]

    def run_beside(
        self,
        method: Callable[[Any, Argument], object],
        argument: Argument,
        own: Callable[[], Own],
    ) -> Own:
        """Runs the method on every other rank while this one runs `own`, whose answer is returned."""
        return self._order(method, [argument] * len(self._others), own)[0]

    def check_uploads(self) -> None:
        """Raises when a rank is dead or could not upload its shard. Any thread may ask."""
        if self._ended:
            raise ClusterError(f"{self._name}: it has ended, {self._ended}")
        asked = [other.has_failed_upload.remote() for other in self._others]
        for rank, failed in enumerate(asked, start=1):
            what = f"{self._name}: rank {rank}, whose shard of a version is wanted,"
            if wait_for(failed, what, WATCH_SECONDS):
                raise StorageError(
                    f"{self._name}: rank [{rank}] could not upload its shard of a version"
                )

    def close(self) -> None:
        """Ends the actors, with whatever they are at."""
        self._ended = self._ended or "it was closed"
        self._end()
        for rank in range(self._world_size):
            forget_rank(self._directory, rank)

    def _order(
        self, method: Callable[..., Answer], arguments: Sequence[Any], own: Callable[[], Own]
    ) -> tuple[Own, list[Answer]]:
        if self._ended:
            raise ClusterError(f"{self._name}: it takes no orders any more, {self._ended}")
        if not self._others:
            return own(), []
        with self._all_or_none():
            pairs = zip(self._others, arguments, strict=True)
            asked = [other.run.remote(method, argument) for other, argument in pairs]
            return self._together(method.__name__, asked, own)

    def _together(
        self, what: str, asked: Sequence[Any], own: Callable[[], Own]
    ) -> tuple[Own, list[Any]]:
        try:
            answer = own()
        except OstinatoError:
            raise
        except Exception as error:
            ray.wait(list(asked), timeout=LAST_WORDS_SECONDS)
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
            for reference in ready:  # a rank's own error says more than the collective it broke
                self._read(what, asked.index(reference) + 1, reference)
            raise ClusterError(
                f"{self._name}: a rank broke off at {what!r}, wanted all of them ({error!r})"
            ) from error
        return answer, self._gather(what, asked, self._patience_seconds)

    def _gather(self, what: str, asked: Sequence[Any], patience_seconds: float) -> list[Any]:
        """Answers by rank. They are read as they come, so that the first to fail is named."""
        answers: dict[int, Any] = {}
        ranks = {reference: rank for rank, reference in enumerate(asked, start=1)}
        deadline = time.monotonic() + patience_seconds
        while ranks:
            ready, _ = ray.wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ClusterError(
                    f"{self._name}: ranks {sorted(ranks.values())} gave no answer to {what!r} within "
                    f"{patience_seconds:.0f} s"
                )
            rank = ranks.pop(ready[0])
            answers[rank] = self._read(what, rank, ready[0])
        return [answers[rank] for rank in sorted(answers)]

    def _read(self, what: str, rank: int, reference: Any) -> Any:
        try:
            is_answer, value = ray.get(reference)
        except RayError as error:
            raise ClusterError(
                f"{self._name}: rank {rank} was lost at {what!r}: {type(error).__name__}: {error}"
            ) from error
        if not is_answer:
            raise ClusterError(f"{self._name}: rank {rank} failed at {what!r}: {value}")
        return value

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Whatever goes wrong here ends all ranks."""
        try:
            yield
        except BaseException as error:
            self._ended = str(error) or "it was interrupted"
            self._end()
            raise

    def _end(self) -> None:
        others, self._others = self._others, []  # later callers find _ended set
        for other in others:
            ray.kill(other)
        if others:
            marks = marked_ranks(self._directory)
            here = [mark.pid for rank, mark in marks.items() if rank and is_alive(mark)]
            kill_processes(here)  # a stopped process does not react to Ray's kill
            close_process_groups()


def _answer(work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, work()
    except Exception:  # noqa: BLE001 - whatever fails in a rank, rank 0 must hear why
        return False, traceback.format_exc(limit=-3)
