"""Ranks of a training stage as actors of a Ray cluster: all run the same function, and the first
one's answer is the stage's.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import RayTaskError

from ostinato.infra.platform.cluster.actors import wait_for
from ostinato.infra.platform.cluster.placement import (
    meet_here,
    rank_options,
    release_ranks,
    reserve_ranks,
)
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.models.layout import ParallelLayout
from ostinato.models.process_groups import host_meeting
from ostinato.models.training.data_parallel import run_rank

Request = TypeVar("Request")
Answer = TypeVar("Answer")

START_SECONDS = 600.0  # until a process has imported what it needs
ANSWER_SECONDS = 60.0  # for an answer that is there
LAST_WORDS_SECONDS = 5.0  # ranks that lost another fail before Ray reports the lost one


class StageRank:
    """One rank as a Ray actor."""

    def __init__(self) -> None:
        configure_logging()
        self._meeting: Any = None

    def host(self) -> str:
        """URL at which the others meet this one, the first."""
        self._meeting, url = host_meeting(meet_here())
        return url

    def run(
        self,
        function: Callable[[Request, int], Answer],
        request: Request,
        rank: int,
        layout: ParallelLayout,
        url: str,
        kind: Literal["cpu", "cuda"],
    ) -> Answer:
        """Runs the function with open process groups."""
        meet_here()
        meeting = url if self._meeting is None else self._meeting
        return run_rank(function, request, rank, layout, meeting, kind)


def run_rank_actors(
    function: Callable[[Request, int], Answer],
    request: Request,
    layout: ParallelLayout,
    kind: Literal["cpu", "cuda"],
) -> Answer:
    """Rank 0's answer to `function(request, rank)`, run in actors. ClusterError when a rank is lost."""
    room = reserve_ranks(layout.world_size, kind)
    try:
        actor: Any = ray.remote(StageRank)
        ranks = [
            actor.options(**rank_options(room, rank)).remote() for rank in range(layout.world_size)
        ]
        url = wait_for(ranks[0].host.remote(), "the start of rank 0", START_SECONDS)
        running = [
            one.run.remote(function, request, rank, layout, url, kind)
            for rank, one in enumerate(ranks)
        ]
        return _first_answer(running)
    finally:
        release_ranks(room)


def _first_answer(running: list[Any]) -> Any:
    names = {one: f"rank {rank} of {len(running)}" for rank, one in enumerate(running)}
    waiting = running
    try:
        while waiting:
            ready, waiting = ray.wait(waiting)
            wait_for(ready[0], names[ready[0]], ANSWER_SECONDS)
    except RayTaskError:
        ended, _ = ray.wait(waiting, num_returns=len(waiting), timeout=LAST_WORDS_SECONDS)
        for one in ended:
            with contextlib.suppress(RayTaskError):
                wait_for(one, names[one], ANSWER_SECONDS)  # a lost rank's ClusterError is the cause
        raise
    return wait_for(running[0], names[running[0]], ANSWER_SECONDS)
