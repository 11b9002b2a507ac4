"""`ostinato gc`: removes what can be had again, or what nothing reads any more, from this machine's home.

Bytes of artifacts lie in the object store; retention.py removes those that a recipe no longer wants. Logs, metrics,
requests and results of stages stay.
"""

import contextlib
import itertools
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.filesize import decimal

from ostinato.flows.stages.declared import STAGES
from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.cluster.processes import is_alive, live_owners
from ostinato.infra.platform.cluster.workspace import (
    FAILURE,
    LOG,
    METRICS,
    PROCESS,
    PROGRESS,
    PUBLISHED,
    REQUEST,
    RESULT,
    ProcessMark,
    read_record,
)
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.gateway.uploads.expiry import expired, uploads_folder

_KEPT = {FAILURE, LOG, METRICS, PROGRESS, PUBLISHED, REQUEST, RESULT, "stage.json"}
_DAY_SECONDS = 86_400.0


class Garbage(Record):
    """One thing to remove."""

    path: Path
    size_bytes: int
    why: str


class Checkpoint(Record):
    """A checkpoint whose bytes leave the object store."""

    artifact: str
    size_bytes: int
    why: str


class Removal(Record):
    """All that one `ostinato gc` removes, or would."""

    checkpoints: tuple[Checkpoint, ...]
    files: tuple[Garbage, ...]
    is_dry: bool = Field(description="nothing was removed")


def find_garbage(settings: Settings, older_than_days: float) -> list[Garbage]:
    """Files and folders of this home that may go. Nothing that a live process works in."""
    before = time.time() - older_than_days * _DAY_SECONDS
    stages = [path for path in (settings.home / "runs").glob("*/*") if path.is_dir()]
    live = live_stages(settings)
    found = [
        item
        for stage in stages
        if stage not in live
        for item in _of_stage(stage)
        if item.path.stat().st_mtime < before
    ]
    if not live:  # a stage under way may read any of them
        found += [item for item in _copies(settings) if item.path.stat().st_mtime < before]
    gone = expired(uploads_folder(settings), settings.upload_hours, time.time())
    found += [_item(path, "upload of a tenant that expired") for path in gone]
    return found


def describe(found: Iterable[Garbage]) -> Iterator[str]:
    """A line for each folder and reason."""
    for (folder, why), group in itertools.groupby(found, lambda item: (item.path.parent, item.why)):
        items = list(group)
        place = items[0].path if len(items) == 1 else f"{folder}, {len(items)} things"
        yield f"{place}, {decimal(sum(item.size_bytes for item in items))}: {why}"


def show(removal: Removal) -> None:
    """Prints what goes and why, and the sum."""
    console = Console()
    items = (*removal.checkpoints, *removal.files)
    removed = [
        f"{one.artifact}, {decimal(one.size_bytes)}: {one.why}" for one in removal.checkpoints
    ]
    for line in (*removed, *describe(removal.files)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    size = decimal(sum(item.size_bytes for item in items))
    would = "would free " if removal.is_dry else ""
    console.print(f"{would}{len(items)} things, {size}", highlight=False)


def remove(garbage: Garbage) -> None:
    """Removes it. What is gone already is no error."""
    if garbage.path.is_dir():
        shutil.rmtree(garbage.path, ignore_errors=True)
    else:
        garbage.path.unlink(missing_ok=True)


def live_stages(settings: Settings) -> list[Path]:
    """Folders that a process of this home works in, or waits for."""
    return [path for path in (settings.home / "runs").glob("*/*") if _is_live(path)]


def _is_live(stage: Path) -> bool:
    mark = read_record(stage / PROCESS, ProcessMark)
    return bool(live_owners(stage)) or (mark is not None and is_alive(mark))


def _of_stage(stage: Path) -> Iterator[Garbage]:
    if ".superseded-" in stage.name:
        yield _item(stage, "work of another request")
    elif (stage / PUBLISHED).is_file():
        reference = (stage / PUBLISHED).read_text()
        for path in stage.iterdir():
            if path.name not in _KEPT:
                yield _item(path, f"working files of {reference}, which is published")


def _copies(settings: Settings) -> Iterator[Garbage]:
    """Local copies of artifacts, save those of what serves users and its ancestors."""
    with contextlib.closing(open_ledger(settings)) as ledger:
        artifacts = open_artifacts(settings, ledger)
        served = set()
        for line in ledger.promotions.lines():
            champion = ledger.promotions.current(line)
            if champion is not None:
                ref = artifacts.get(champion.checkpoint_id)
                served |= {item.fingerprint for item in (ref, *artifacts.lineage(ref))}
    kinds = {stage.kind for stage in STAGES.values()}
    for path in (settings.home / "artifacts").glob("*/*"):
        if path.parent.name in kinds and path.name not in served:
            yield _item(path, "local copy of an artifact in the object store")


def _item(path: Path, why: str) -> Garbage:
    files = [path] if path.is_file() else path.rglob("*")
    size = sum(file.lstat().st_size for file in files if file.is_file())
    return Garbage(path=path, size_bytes=size, why=why)
