"""`ostinato show ARTIFACT`: the lineage of an artifact back to source archives, and the lines it served."""

import time
from collections.abc import Iterator

from pydantic import Field

from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import PromotionRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings

SOURCES = "sources"  # metadata key: source archives and git repositories
SOLVED = "solved"  # metadata key of probes: number of problems by solved attempts
_INDENT = "    "


class Ancestor(Record):
    """An artifact and its ancestors."""

    artifact: str
    fingerprint: str
    created_at: float = Field(description="seconds since the epoch")
    size_bytes: int
    changed_files: tuple[str, ...] = Field(description="code that changed while it was made")
    sources: tuple[str, ...] = Field(description="packages at a version, git repositories")
    served: tuple[str, ...] = Field(
        description="promotions and rollbacks that made it the champion of a serving line"
    )
    solved: dict[str, int] = Field(
        default={}, description="problems of probes by solved attempts, such as 1 of 4"
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
        solved=manifest.metadata.get(SOLVED, {}),
        served=tuple(_describe(ledger, row) for row in history if row.checkpoint_id == str(ref)),
        parents=tuple(
            # found by fingerprint, because version numbers differ between ledgers
            _trace(artifacts, ledger, artifacts.find(ref.kind, ref.name, ref.fingerprint) or ref)
            for ref in manifest.parents
        ),
    )


def describe(node: Ancestor, depth: int = 0, seen: set[str] | None = None) -> Iterator[str]:
    """Lines for the console, with parents below their child. A repeated artifact gets only a line with its name."""
    seen = set() if seen is None else seen
    if node.artifact in seen:
        yield f"{_INDENT * depth}{node.artifact}  as above"
        return
    seen.add(node.artifact)
    yield (
        f"{_INDENT * depth}{node.artifact}  {node.fingerprint}  {_when(node.created_at)}  "
        f"{node.size_bytes:,} bytes"
    )
    facts = [*node.served, *(f"source {source}" for source in node.sources)]
    facts += [f"{count} problems solved in {part} attempts" for part, count in node.solved.items()]
    if node.changed_files:
        facts.append(f"code changed while it was made: {', '.join(node.changed_files)}")
    yield from (f"{_INDENT * depth}  | {fact}" for fact in facts)
    for parent in node.parents:
        yield from describe(parent, depth + 1, seen)


def _when(instant: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(instant))


def _describe(ledger: Ledger, row: PromotionRow) -> str:
    how = "promoted" if row.action == "promote" else "serves again"
    card = None if row.scorecard_id is None else ledger.scorecards.get(row.scorecard_id)
    rate = "" if card is None else f", solve rate {card.payload['average']['mean']:.1%}"
    return f"{how} on line {row.line} {_when(row.at)}{rate}: {row.reason}"
