"""`ostinato show ARTIFACT`: what an artifact was made from, back to source archives, and whom it served."""

import time

from pydantic import Field
from rich.tree import Tree

from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import PromotionRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings

SOURCES = (
    "sources"  # in the metadata of a problem set: archives and repositories that it was made of
)


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


def draw(top: Ancestor) -> Tree:
    """A tree for the console. What was drawn before is named alone."""
    return _drawn(top, set())


def _drawn(one: Ancestor, seen: set[str]) -> Tree:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.created_at))
    tree = Tree(f"{one.artifact}  {one.fingerprint}  {made}  {one.size_bytes:,} bytes")
    if one.artifact in seen:
        return Tree(f"{one.artifact}  as above")
    seen.add(one.artifact)
    for text in one.served:
        tree.add(text)
    if one.changed_files:
        tree.add(f"code changed while it was made: {', '.join(one.changed_files)}")
    for source in one.sources:
        tree.add(f"source {source}")
    for parent in one.parents:
        tree.children.append(_drawn(parent, seen))
    return tree


def _told(ledger: Ledger, row: PromotionRow) -> str:
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.at))
    how = "promoted" if row.action == "promote" else "serves again"
    card = None if row.scorecard_id is None else ledger.scorecards.get(row.scorecard_id)
    rate = "" if card is None else f", solve rate {card.payload['average']['mean']:.1%}"
    return f"{how} on line {row.line} {at}{rate}: {row.reason}"
