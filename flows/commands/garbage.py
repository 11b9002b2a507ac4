"""`ostinato gc`: removes files that can be made again or that nothing reads any more.

It removes working files and local copies from this machine's home, and keeps logs, metrics, requests and results of
stages. With a recipe it also removes checkpoints that the recipe's `[retention]` does not keep from the object store.
Ledger rows and lineage stay. A removed checkpoint can no longer be read; its stage can build it again while its parents
exist.
"""

import contextlib
import itertools
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, PlainSerializer
from rich.console import Console
from rich.filesize import decimal

from ostinato.flows.recipe import Recipe
from ostinato.flows.recipe_differences import RECIPE_FILE
from ostinato.flows.stages.declared import CANDIDATE, REINFORCEMENT, STAGES, START_FILE
from ostinato.flows.stages.stage import CHECKPOINT_KINDS
from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts, open_artifacts
from ostinato.infra.platform.cluster.processes import is_alive, live_owners, processes_with
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
    RequestEnvelope,
    read_record,
)
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import ArtifactRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.gateway.uploads.expiry import expired, uploads_folder
from ostinato.infra.serving.weights.manifest import chain_prefix
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from ostinato.tasks.reinforcement.records import STEPS_FOLDER

_KEPT = {FAILURE, LOG, METRICS, PROGRESS, PUBLISHED, REQUEST, RESULT, RECIPE_FILE, START_FILE}
_DAY_SECONDS = 86_400.0
_CANDIDATE, _REINFORCED = CANDIDATE.kind, REINFORCEMENT.kind


class Garbage(Record):
    """A file or folder that may be removed."""

    path: Path
    size_bytes: int
    why: str


class ExpiredCheckpoint(Record):
    """A checkpoint to remove from the object store."""

    artifact: Annotated[ArtifactRef, PlainSerializer(str)]
    size_bytes: int
    why: str


class Removal(Record):
    """Everything that one `ostinato gc` removes, or would remove in a dry run."""

    checkpoints: tuple[ExpiredCheckpoint, ...]
    files: tuple[Garbage, ...]
    is_dry: bool = Field(description="true: nothing was removed")


def collect(
    settings: Settings, recipe: Recipe | None, older_than_days: float, *, is_dry: bool
) -> Removal:
    """Finds files of the home, and checkpoints that a recipe's retention does not keep. Removes them unless `is_dry`."""
    store = Retention(settings)
    checkpoints = [] if recipe is None else store.find(recipe)
    files = find_garbage(settings, older_than_days)
    if not is_dry:
        for checkpoint in checkpoints:
            store.remove(checkpoint)
        for file in files:
            remove(file)
    return Removal(checkpoints=tuple(checkpoints), files=tuple(files), is_dry=is_dry)


def show(removal: Removal) -> None:
    """Prints each checkpoint, the files by folder and reason, and the totals."""
    lines = [f"{one.artifact}, {decimal(one.size_bytes)}: {one.why}" for one in removal.checkpoints]
    by_folder = itertools.groupby(removal.files, lambda file: (file.path.parent, file.why))
    for (folder, why), group in by_folder:
        files = list(group)
        place = files[0].path if len(files) == 1 else f"{folder}, {len(files)} items"
        lines.append(f"{place}, {decimal(sum(file.size_bytes for file in files))}: {why}")
    console = Console()
    for line in lines:
        console.out(line, highlight=False)
    items = (*removal.checkpoints, *removal.files)
    would = "would free " if removal.is_dry else ""
    size = decimal(sum(item.size_bytes for item in items))
    console.print(f"{would}{len(items)} items, {size}", highlight=False)


def find_garbage(settings: Settings, older_than_days: float) -> list[Garbage]:
    """Files and folders of this home that may be removed, except those of live processes."""
    before = time.time() - older_than_days * _DAY_SECONDS
    stages = [path for path in (settings.home / "runs").glob("*/*") if path.is_dir()]
    live = live_stages(settings)
    found = [
        item
        for stage in stages
        if stage not in live
        for item in _garbage_of_stage(stage)
        if item.path.stat().st_mtime < before
    ]
    if not live:  # a running stage may read any of them
        found += [item for item in _local_copies(settings) if item.path.stat().st_mtime < before]
    gone = expired(uploads_folder(settings), settings.upload_hours, time.time())
    found += [_garbage_at(path, "expired upload of a tenant") for path in gone]
    return found


def remove(garbage: Garbage) -> None:
    """Removes a file or folder if it exists."""
    if garbage.path.is_dir():
        shutil.rmtree(garbage.path, ignore_errors=True)
    else:
        garbage.path.unlink(missing_ok=True)


def live_stages(settings: Settings) -> list[Path]:
    """Folders of stages that a process of this home runs or waits for."""
    return [path for path in (settings.home / "runs").glob("*/*") if _is_live(path)]


def _is_live(stage: Path) -> bool:
    mark = read_record(stage / PROCESS, ProcessMark)
    return bool(live_owners(stage)) or (mark is not None and is_alive(mark))


def _garbage_of_stage(stage: Path) -> Iterator[Garbage]:
    if ".superseded-" in stage.name:
        yield _garbage_at(stage, "work of a superseded request")
    elif (stage / PUBLISHED).is_file():
        reference = (stage / PUBLISHED).read_text()
        for path in stage.iterdir():
            if path.name not in _KEPT:
                yield _garbage_at(path, f"working files of {reference}, which is published")


def _local_copies(settings: Settings) -> Iterator[Garbage]:
    """Local copies of artifacts, except champions of serving lines and their ancestors."""
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
            yield _garbage_at(path, "local copy of an artifact in the object store")


def _garbage_at(path: Path, why: str) -> Garbage:
    files = [path] if path.is_file() else path.rglob("*")
    size = sum(file.lstat().st_size for file in files if file.is_file())
    return Garbage(path=path, size_bytes=size, why=why)


class Retention:
    """The checkpoints of a home in its object store."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = open_ledger(settings)
        self._objects = open_object_store(settings)
        self._artifacts = Artifacts(self._objects, self._ledger)

    def find(self, recipe: Recipe) -> list[ExpiredCheckpoint]:
        """Checkpoints of this home that the recipe does not keep. ConfigError while something may read one."""
        self._require_idle(recipe)
        rows = [
            row for kind in sorted(CHECKPOINT_KINDS) for row in self._ledger.artifacts.list(kind)
        ]
        own = [row for row in rows if row.name == recipe.name and self._folders(row)]
        kept = self._kept_ids(recipe, rows)
        promoted = self._ledger.promotions.active_checkpoints(recipe.serving.line or "")
        days = recipe.retention.days
        before = -1.0 if days is None else time.time() - days * _DAY_SECONDS
        found = []
        for row in own:
            ref = ArtifactRef.model_validate(row, from_attributes=True)
            if self._artifacts.is_removed(ref):
                why = "remainder of an interrupted removal"
            elif row.artifact_id in kept:
                continue
            elif str(ref) in promoted:
                why = f"promoted before the newest {recipe.retention.checkpoints_per_line}"
            elif row.created_at < before:
                why = f"older than {days:g} days, and no kept checkpoint descends from it"
            else:
                continue
            size = self._artifacts.size_bytes(ref) + sum(self._chain_keys(ref).values())
            if size:
                found.append(ExpiredCheckpoint(artifact=ref, size_bytes=size, why=why))
        return found

    def remove(self, checkpoint: ExpiredCheckpoint) -> None:
        """Adds an event to the ledger, then removes weight chain, stage files and local copy, and last the artifact."""
        ref = checkpoint.artifact
        payload = {"artifact": str(ref), "why": checkpoint.why, "size_bytes": checkpoint.size_bytes}
        self._ledger.events.add("retention", "artifact.removed", payload, time.time())
        if not self._artifacts.is_removed(ref):
            for key in self._chain_keys(ref):
                self._objects.delete(key)
            for folder in self._folders(ref):
                _empty(folder)
            shutil.rmtree(
                self._settings.home / "artifacts" / ref.kind / ref.fingerprint, ignore_errors=True
            )
        self._artifacts.remove(ref)

    def _require_idle(self, recipe: Recipe) -> None:
        home = self._settings.home
        working = [str(path) for path in live_stages(self._settings)]
        engines = processes_with("OSTINATO_HOME", str(home), ("prefect.engine",))
        working += [f"a flow run, process {pid}" for pid in engines]
        for line in {*self._ledger.promotions.lines(), recipe.serving.line or ""}:
            cycle = self._ledger.cycles.open_cycle(line)
            working += [] if cycle is None else [f"cycle {cycle.cycle_id}, which is open"]
        if working:
            raise ConfigError(
                f"in progress: {', '.join(working)}, wanted nothing that may read a checkpoint; wait for its end"
            )

    def _kept_ids(self, recipe: Recipe, rows: Iterable[ArtifactRow]) -> set[int]:
        """Ids of the artifacts to keep: checkpoints that serve or can be rolled back to, the newest of each kind,
        those that replay needs, other recipes' artifacts, and the ancestors of all these. Candidates of earlier
        cycles are not kept as ancestors when `checkpoints_per_line` is set, because nothing loads them.
        """
        serving: set[str] = set()
        for line in self._ledger.promotions.lines():
            limit = recipe.retention.checkpoints_per_line if line == recipe.serving.line else None
            serving |= {*self._ledger.promotions.active_checkpoints(line)[-(limit or 0) :]}
            canary = ServingLine(self._ledger, line, time.time).canary()
            serving |= set() if canary is None else {canary.checkpoint_id}
        newest = {row.kind: row.artifact_id for row in rows if row.name == recipe.name}
        kept: set[int] = set()
        for row in rows:
            reference = f"{row.kind}/{row.name}@{row.version}"
            if (
                reference in serving
                or row.name != recipe.name
                or newest[row.kind] == row.artifact_id
                or self._can_be_replayed(row)
            ):
                kept.add(row.artifact_id)
                kept |= self._needed_by(row, recipe)
        return kept

    def _needed_by(self, row: ArtifactRow, recipe: Recipe) -> set[int]:
        ref = ArtifactRef.model_validate(row, from_attributes=True)
        is_limited = recipe.retention.checkpoints_per_line is not None and row.name == recipe.name
        found = set()
        for ancestor in self._artifacts.lineage(ref):
            is_history = is_limited and (ancestor.kind, ancestor.name) == (_CANDIDATE, recipe.name)
            known = self._ledger.artifacts.find(ancestor.kind, ancestor.name, ancestor.fingerprint)
            if known is not None and not is_history:
                found.add(known.artifact_id)
        return found

    def _folders(self, made: ArtifactRow | ArtifactRef) -> list[Path]:
        """Run directories of this home that made an artifact. Empty when another home made it."""
        return [*self._settings.home.glob(f"runs/*/{made.kind}-{made.fingerprint}")]

    def _chain_keys(self, made: ArtifactRow | ArtifactRef) -> dict[str, int]:
        """Keys and sizes of the weight chain published while a checkpoint was trained. Nothing reads it afterwards."""
        found: dict[str, int] = {}
        for folder in self._folders(made):
            envelope = read_record(folder / REQUEST, RequestEnvelope)
            owner = {} if envelope is None else envelope.request
            for name in {"cycle_id", "run_id"} & owner.keys():
                found |= self._objects.sizes(f"{chain_prefix(f'chain-{owner[name]}')}/")
        return found

    def _can_be_replayed(self, row: ArtifactRow) -> bool:
        for folder in self._folders(row) if row.kind == _REINFORCED else ():
            envelope = read_record(folder / REQUEST, RequestEnvelope)
            is_kept = envelope is not None and envelope.request["learning"]["keep_for_replay"]
            if is_kept and (folder / STEPS_FOLDER).is_dir():  # `ostinato gc` removes old ones
                return True
        return False


def _empty(folder: Path) -> None:
    """Removes everything except the log, so that no stage takes the folder for finished or running work."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOG:
            path.unlink()
