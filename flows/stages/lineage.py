"""`ostinato show ARTIFACT`: what an artifact was made from, back to source archives, and whom it served."""

import time
from collections.abc import Iterator

from pydantic import Field

from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import PromotionRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings

SOURCES = "sources"  # in the metadata of a problem set: archives and git repositories
_INDENT = "    "


class Ancestor(Record):
    """An artifact with what it was made from."""

    artifact: str
    fingerprint: str
    created_at: float = Field(description="seconds since the epoch")
    size_bytes: int
    changed_files: tuple[str, ...] = Field(description="code that changed while it was made")
    sources: tuple[str, ...] = Field(description="packages at a version, git repositories")
    served: tuple[str, ...] = Field(
        description="serving lines whose champion it became or was taken"
    )
    parents: tuple["Ancestor", ...]


def trace(settings: Settings, name: str) -> Ancestor:
    """The lineage of an artifact kind/name@version. ConfigError when there is none."""
    ledger = open_ledger(settings)
    artifacts = Artifacts(open_object_store(settings), ledger)
    return _trace(artifacts, ledger, artifacts.get(name))


def _trace(artifacts: Artifacts, ledger: Ledger, ref: ArtifactRef) -> Ancestor:
    manifest = artifacts.manifest(ref)
    history = [row for line in ledger.promotions.lines() for row in ledger.promotions.history(line)]
    return Ancestor(
        artifact=str(ref),
        fingerprint=ref.fingerprint,
        created_at=manifest.created_at,
        size_bytes=sum(file.size_bytes for file in manifest.files),
        changed_files=manifest.changed_files,
        sources=tuple(manifest.metadata.get(SOURCES, ())),
        served=tuple(_told(ledger, row) for row in history if row.checkpoint_id == str(ref)),
        parents=tuple(
            # by its fingerprint: versions are this ledger's own
            _trace(artifacts, ledger, artifacts.find(one.kind, one.name, one.fingerprint) or one)
            for one in manifest.parents
        ),
    )


def describe(one: Ancestor, depth: int = 0, seen: set[str] | None = None) -> Iterator[str]:
    """Lines for the console, each parent below what was made from it. Repeated ones are named alone."""
    seen = set() if seen is None else seen
    if one.artifact in seen:
        yield f"{_INDENT * depth}{one.artifact}  as above"
        return
    seen.add(one.artifact)
    yield (
        f"{_INDENT * depth}{one.artifact}  {one.fingerprint}  {_when(one.created_at)}  "
        f"{one.size_bytes:,} bytes"
    )
    facts = [*one.served, *(f"source {source}" for source in one.sources)]
    if one.changed_files:
        facts.append(f"code changed while it was made: {', '.join(one.changed_files)}")
    yield from (f"{_INDENT * depth}  | {fact}" for fact in facts)
    for parent in one.parents:
        yield from describe(parent, depth + 1, seen)


def _when(instant: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(instant))


def _told(ledger: Ledger, row: PromotionRow) -> str:
    how = "promoted" if row.action == "promote" else "serves again"
    card = None if row.scorecard_id is None else ledger.scorecards.get(row.scorecard_id)
    rate = "" if card is None else f", solve rate {card.payload['average']['mean']:.1%}"
    return f"{how} on line {row.line} {_when(row.at)}{rate}: {row.reason}"
