"""Ranks of a stage as processes of this machine.

Callers agree on step counts beforehand, since a rank that stops alone leaves the others waiting.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import TypeVar

from torch._C._distributed_c10d import Store

from ostinato.models.device import DeviceKind
from ostinato.models.layout import ParallelLayout
from ostinato.models.process_groups import close_process_groups, host_meeting, open_process_groups

Request = TypeVar("Request")
Answer = TypeVar("Answer")

EXIT_WAIT_SECONDS = 60.0
# wait for exit codes: a rank's connection breaks before its exit code is known
LAST_WORDS_SECONDS = 5.0


class LostRank(RuntimeError):
    """A rank that was killed."""


def run_ranks(
    function: Callable[[Request, int], Answer],
    request: Request,
    layout: ParallelLayout,
    kind: DeviceKind = "cpu",
) -> Answer:
    """Runs `function(request, rank)` in the processes of `layout` with open process groups, each on
    its device, and returns rank 0's answer once all have ended.

    Rank 0 is this process; groups that it had open are closed. If a rank dies, the others fail in
    their next collective, and this process raises LostRank. If a rank fails or hangs after rank 0's
    answer, it raises RuntimeError.
    """
    store, url = host_meeting("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(
            target=run_rank, args=(function, request, rank, layout, url, kind), daemon=True
        )
        for rank in range(1, layout.world_size)
    ]
    try:
        for process in others:
            process.start()
        answer = run_rank(function, request, 0, layout, store, kind)
        _join(others, EXIT_WAIT_SECONDS)
        codes = {rank: process.exitcode for rank, process in enumerate(others, start=1)}
        if any(code != 0 for code in codes.values()):
            raise RuntimeError(
                f"rank 0 answered, and {EXIT_WAIT_SECONDS} s later the others had the exit codes {codes} by rank, "
                "wanted 0 (None: still running); see the log for the cause"
            )
        return answer
    except Exception as error:
        _join(others, LAST_WORDS_SECONDS)
        codes = {rank: process.exitcode or 0 for rank, process in enumerate(others, start=1)}
        if lost := {rank: -code for rank, code in codes.items() if code < 0}:
            raise LostRank(f"ranks were killed, with signals by rank {lost}") from error
        raise
    finally:
        for process in others:
            if process.is_alive():
                process.kill()


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Waits at most `seconds` for all processes together."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def run_rank(
    function: Callable[[Request, int], Answer],
    request: Request,
    rank: int,
    layout: ParallelLayout,
    meeting: Store | str,
    kind: DeviceKind,
) -> Answer:
    """Runs `function(request, rank)` with open process groups."""
    close_process_groups()
    open_process_groups(rank, layout.world_size, meeting, layout=layout, kind=kind)
    try:
        return function(request, rank)
    finally:
        close_process_groups()
