"""`ostinato gc --recipe`: checkpoints that a recipe's `[retention]` no longer wants leave the object store.

Ledger rows and lineage stay. A removed checkpoint is gone for its readers at once; the stage that made it makes it
again, as long as its own parents exist.
"""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from rich.filesize import decimal

from ostinato.flows.commands.garbage import live_stages
from ostinato.flows.recipe import Recipe
from ostinato.flows.stages.declared import CANDIDATE, REINFORCEMENT
from ostinato.flows.stages.stage import CHECKPOINT_KINDS
from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts
from ostinato.infra.platform.cluster.processes import processes_with
from ostinato.infra.platform.cluster.workspace import LOG, REQUEST, RequestEnvelope, read_record
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import ArtifactRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.weights.manifest import chain_prefix
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from ostinato.tasks.reinforcement.records import STEPS_FOLDER

_DAY_SECONDS = 86_400.0
_CANDIDATE, _REINFORCED = CANDIDATE.kind, REINFORCEMENT.kind


class Expired(Record):
    """A checkpoint whose bytes may go."""

    ref: ArtifactRef
    size_bytes: int
    why: str

    @property
    def title(self) -> str:
        return f"{self.ref}, {decimal(self.size_bytes)}"


class Retention:
    """The checkpoints of a home in its object store."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = open_ledger(settings)
        self._objects = open_object_store(settings)
        self._artifacts = Artifacts(self._objects, self._ledger)

    def find(self, recipe: Recipe) -> list[Expired]:
        """What the recipe no longer wants, of what this home made. ConfigError while something may read it."""
        self._require_rest(recipe)
        rows = [
            row for kind in sorted(CHECKPOINT_KINDS) for row in self._ledger.artifacts.list(kind)
        ]
        own = [row for row in rows if row.name == recipe.name and self._folders(row)]
        kept = self._kept(recipe, rows)
        promoted = self._ledger.promotions.active_checkpoints(recipe.serving.line or "")
        days = recipe.retention.days
        before = -1.0 if days is None else time.time() - days * _DAY_SECONDS
        found = []
        for row in own:
            ref = ArtifactRef.model_validate(row, from_attributes=True)
            if self._artifacts.is_removed(ref):
                why = "left of a removal that was interrupted"
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
                found.append(Expired(ref=ref, size_bytes=size, why=why))
        return found

    def remove(self, expired: Expired) -> None:
        """Says so in the ledger, then removes what a stage would take for finished work, then the artifact."""
        ref = expired.ref
        payload = {"artifact": str(ref), "why": expired.why, "size_bytes": expired.size_bytes}
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

    def _require_rest(self, recipe: Recipe) -> None:
        home = self._settings.home
        working = [str(path) for path in live_stages(self._settings)]
        engines = processes_with("OSTINATO_HOME", str(home), ("prefect.engine",))
        working += [f"a flow run, process {pid}" for pid in engines]
        for line in {*self._ledger.promotions.lines(), recipe.serving.line or ""}:
            cycle = self._ledger.cycles.open_cycle(line)
            working += [] if cycle is None else [f"cycle {cycle.cycle_id}, which is open"]
        if working:
            raise ConfigError(
                f"under way: {', '.join(working)}, wanted nothing that may read a checkpoint; wait for its end"
            )

    def _kept(self, recipe: Recipe, rows: Iterable[ArtifactRow]) -> set[int]:
        """Ids of the artifacts that stay: checkpoints that serve or can be rolled back to, the newest of each kind,
        what replay needs, other recipes' artifacts, and all that these were made from. Candidates of earlier
        cycles go: nothing loads them.
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
        for one in self._artifacts.lineage(ref):
            is_history = is_limited and (one.kind, one.name) == (_CANDIDATE, recipe.name)
            known = self._ledger.artifacts.find(one.kind, one.name, one.fingerprint)
            if known is not None and not is_history:
                found.add(known.artifact_id)
        return found

    def _folders(self, made: ArtifactRow | ArtifactRef) -> list[Path]:
        """Run directories of this home that made it. None: another home did."""
        return [*self._settings.home.glob(f"runs/*/{made.kind}-{made.fingerprint}")]

    def _chain_keys(self, made: ArtifactRow | ArtifactRef) -> dict[str, int]:
        """Keys and sizes of the weight chain that its training published, which nothing reads once that is over."""
        found: dict[str, int] = {}
        for folder in self._folders(made):
            asked = read_record(folder / REQUEST, RequestEnvelope)
            owner = {} if asked is None else asked.request
            for name in {"cycle_id", "run_id"} & owner.keys():
                found |= self._objects.sizes(f"{chain_prefix(f'chain-{owner[name]}')}/")
        return found

    def _can_be_replayed(self, row: ArtifactRow) -> bool:
        for folder in self._folders(row) if row.kind == _REINFORCED else ():
            asked = read_record(folder / REQUEST, RequestEnvelope)
            is_kept = asked is not None and asked.request["learning"]["keep_for_replay"]
            if is_kept and (folder / STEPS_FOLDER).is_dir():  # `ostinato gc` removes them with time
                return True
        return False


def _empty(folder: Path) -> None:
    """Removes everything but the log: nothing there may be taken for a stage that is finished or under way."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOG:
            path.unlink()
