"""Marks of the ranks of a stage, which tell `ostinato status` which process is which rank.

A rank that ends normally removes its mark. A mark that stays belongs to a live rank, a killed rank or an earlier
attempt, whose marks are older than the stage's own process.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.cluster.workspace import ProcessMark, read_record, replace_text

FOLDER = "ranks"


@contextlib.contextmanager
def marked_rank(directory: Path, rank: int) -> Iterator[None]:
    """Marks this process as a rank for the length of the block. After an error the mark stays."""
    mark_rank(directory, rank)
    yield
    forget_rank(directory, rank)


def mark_rank(directory: Path, rank: int) -> None:
    """Notes that this process is a rank of the work in a directory."""
    path = _path(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, mark_process(os.getpid()).model_dump_json())


def forget_rank(directory: Path, rank: int) -> None:
    """Removes the mark of a rank that ends normally."""
    _path(directory, rank).unlink(missing_ok=True)


def marked_ranks(directory: Path) -> dict[int, ProcessMark]:
    """Marks by rank, ascending."""
    found = {}
    for path in sorted((directory / FOLDER).glob("[0-9]*.json")):
        mark = read_record(path, ProcessMark)
        if mark is not None:
            found[int(path.stem)] = mark
    return found


def _path(directory: Path, rank: int) -> Path:
    return directory / FOLDER / f"{rank:05d}.json"
