"""The processes of a trainer's other ranks, which live as long as it does.

`RankGroup`: their start, the orders they get over pipes, their end. A rank that is dead, silent or
in error takes the whole group with it: no rank can go on without the others, and the owner starts
anew from the newest step checkpoint. Every wait has a deadline. It knows no model.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import socket
import struct
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from ostinato.infra.platform.cluster.ranks import forget_rank, mark_rank
from ostinato.infra.platform.errors import ClusterError, OstinatoError, StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.models.process_groups import close_process_groups, open_process_groups
from ostinato.tasks.learning.config import TrainerRequest
from ostinato.tasks.learning.ranks.rank import OtherRank, TrainerRank

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")
Own = TypeVar("Own")

PATIENCE_SECONDS = 600.0  # of a collective, and for an answer: ranks differ by one microbatch
START_SECONDS = 600.0  # until a process has imported what it needs; 8 on an idle core
LAST_WORDS_SECONDS = 5.0  # a rank that fails says why before its connections break
END_SECONDS = 5.0


class RankGroup:
    """The other ranks as rank 0 sees them. In a world of 1 there are none. Used by one thread at a time."""

    def __init__(
        self,
        request: TrainerRequest,
        objects: ObjectStore,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Starts the processes and opens process groups with them. Groups this process had open are closed."""
        self._name = f"the trainer of {request.chain_id}, {request.config.world_size} ranks"
        self._patience_seconds = patience_seconds
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._failed_uploads: list[ctypes.c_bool] = []
        self._ended = ""
        self._directory = directory = Path(request.work_directory)
        self._world_size = world_size = request.config.world_size
        mark_rank(directory, 0)
        if world_size == 1:
            open_process_groups(kind=request.device)
            return
        close_process_groups()
        rendezvous = directory / f"rendezvous-{uuid.uuid4().hex}"
        try:
            with self._all_or_none():
                for rank in range(1, world_size):
                    self._start(rank, (request, objects, rank, rendezvous, patience_seconds))
                self._gather("start", START_SECONDS)
                open_process_groups(
                    0, world_size, rendezvous, patience_seconds, kind=request.device
                )
                self._gather("open process groups", patience_seconds)
        finally:
            rendezvous.unlink(missing_ok=True)

    def run(
        self,
        own: TrainerRank,
        method: Callable[[TrainerRank, Argument], Answer],
        arguments: Sequence[Argument],
    ) -> list[Answer]:
        """Runs the method on every rank, of which `own` is the first. Each has its own argument."""
        mine = functools.partial(method, own, arguments[0])
        answer, others = self._exchange(method, arguments[1:], mine)
        return [answer, *others]

    def run_beside(
        self,
        method: Callable[[OtherRank, Argument], object],
        argument: Argument,
        own: Callable[[], Own],
    ) -> Own:
        """Runs the method on every other rank while this one runs `own`, whose answer is returned."""
        return self._exchange(method, [argument] * len(self._processes), own)[0]

    def check_uploads(self) -> None:
        """Raises when a rank is dead or could not upload its shard. Any thread may ask."""
        if self._ended:
            raise ClusterError(f"{self._name}: it has ended, {self._ended}")
        sentinels = [process.sentinel for process in self._processes]
        if dead := [sentinels.index(ready) + 1 for ready in wait(sentinels, 0)]:  # type: ignore[arg-type]
            raise ClusterError(f"{self._name}: rank {dead} is dead, wanted its shard of a version")
        if failed := [rank for rank, flag in enumerate(self._failed_uploads, 1) if flag.value]:
            raise StorageError(
                f"{self._name}: rank {failed} could not upload its shard of a version"
            )

    def close(self) -> None:
        """Ends the processes, with whatever they are at."""
        self._ended = self._ended or "it was closed"
        self._end()
        for rank in range(self._world_size):
            forget_rank(self._directory, rank)

    def _start(self, rank: int, arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        _limit_waits(ours, self._patience_seconds)
        has_failed = context.RawValue(ctypes.c_bool, False)  # no lock that a dead rank could hold
        process = context.Process(
            target=_serve, args=(theirs, has_failed, *arguments), name=f"rank{rank}", daemon=True
        )
        process.start()
        theirs.close()  # else the end of the rank's would not be seen here
        self._processes.append(process)
        self._pipes.append(ours)
        self._failed_uploads.append(has_failed)

    def _exchange(
        self, method: Callable[..., Answer], arguments: Sequence[Any], own: Callable[[], Own]
    ) -> tuple[Own, list[Answer]]:
        if self._ended:
            raise ClusterError(f"{self._name}: it takes no orders any more, {self._ended}")
        if not self._processes:
            return own(), []
        with self._all_or_none():
            for pipe, argument in zip(self._pipes, arguments, strict=True):
                pipe.send((method, argument))
            answer = own()
            return answer, self._gather(method.__name__, self._patience_seconds)

    def _gather(self, what: str, patience_seconds: float) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes, start=1):
            if not pipe.poll(patience_seconds):
                raise ClusterError(
                    f"{self._name}: rank {rank} gave no answer to {what!r} within {patience_seconds:.0f} s"
                )
            is_answer, value = pipe.recv()
            if not is_answer:
                raise ClusterError(f"{self._name}: rank {rank} failed at {what!r}: {value}")
            answers.append(value)
        return answers

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Whatever goes wrong here ends all ranks. An error without a type is told with the ranks' last words."""
        try:
            yield
        except OstinatoError as error:
            self._ended = str(error)
            self._end()
            raise
        except Exception as error:
            self._ended = f"{self._last_words()} ({error!r})"
            self._end()
            raise ClusterError(f"{self._name}: {self._ended}") from error
        except BaseException:
            self._ended = "it was interrupted"
            self._end()
            raise

    def _last_words(self) -> str:
        """The rank that broke a pipe or a collective, and its reason."""
        sentinels = [process.sentinel for process in self._processes]
        wait([*self._pipes, *sentinels], LAST_WORDS_SECONDS)
        seen = []
        for rank, pipe in enumerate(self._pipes, start=1):
            with contextlib.suppress(OSError, EOFError):
                if pipe.poll(0) and not (words := pipe.recv())[0]:
                    seen.append(f"rank {rank} failed: {words[1]}")
        for rank, process in enumerate(self._processes, start=1):
            if wait([process.sentinel], 0):
                process.join()
                seen.append(f"rank {rank} (pid {process.pid}) ended with {process.exitcode}")
        return "; ".join(seen) or "a rank broke off, wanted all of them"

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # tells the rank to end, should it listen
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_SECONDS)
        if self._processes:
            close_process_groups()
        self._pipes, self._processes = [], []  # whoever waits has _ended to see


def _serve(
    pipe: Connection,
    has_failed: ctypes.c_bool,
    request: TrainerRequest,
    objects: ObjectStore,
    rank: int,
    rendezvous: Path,
    patience_seconds: float,
) -> None:
    """Life of a rank: it ends with rank 0's end of the pipe, at once, whatever is being uploaded."""
    try:
        mark_rank(Path(request.work_directory), rank)
        pipe.send((True, None))
        open_process_groups(
            rank, request.config.world_size, rendezvous, patience_seconds, kind=request.device
        )
        pipe.send((True, None))
        own = OtherRank(request, objects, rank, has_failed)
        while True:
            method, argument = pipe.recv()
            pipe.send((True, method(own, argument)))
    except (EOFError, ConnectionError):
        forget_rank(Path(request.work_directory), rank)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - whatever ends a rank, rank 0 must hear why
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc(limit=-3)))
        os._exit(1)


def _limit_waits(pipe: Connection, patience_seconds: float) -> None:
    """A write or read during which the other side does nothing at all fails after this long."""
    limit = struct.pack("ll", int(patience_seconds), 0)
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as both_ways:
        both_ways.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        both_ways.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
