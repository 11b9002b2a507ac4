"""Shards of an evaluation: concurrent supervised processes, and their combined progress."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import Progress, Workspace

Result = TypeVar("Result", bound=BaseModel)


def run_shards(
    entry: str,
    requests: Sequence[BaseModel],
    result: type[Result],
    workspace: Workspace,
    on_progress: Callable[[Sequence[Progress]], None],
) -> list[Result]:
    """Results in the order of the requests, each from its own process in `shardIofN` of the
    workspace. `on_progress` gets the newest progress of each shard that has reported any.
    """
    count = len(requests)
    newest: dict[int, Progress] = {}

    def run(index: int) -> Result:
        def listen(progress: Progress) -> None:
            newest[index] = progress
            on_progress(list(newest.values()))

        return run_child(
            entry,
            requests[index],
            result,
            directory=workspace.directory / f"shard{index}of{count}",
            on_progress=listen,
            settings=workspace.settings,
        )

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))
