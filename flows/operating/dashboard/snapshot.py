"""What the dashboard shows at one moment: parts, curves of the newest training, weight versions, cycles, arms.

Read from the home's files, the object store and the ledger, as `ostinato status` does; nothing that
runs is asked for more than its health.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from ostinato.flows.operating.status.canaries import open_canaries
from ostinato.flows.operating.status.processes import ProcessTable
from ostinato.flows.operating.status.report import collect
from ostinato.flows.operating.status.rows import StatusRow
from ostinato.flows.operating.status.services import RunningUp
from ostinato.flows.stages.curves import Curve, rl_curves, training_curves
from ostinato.infra.platform.cluster.workspace import METRICS, PROGRESS, Progress, read_record
from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import CycleRow, PromotionRow
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.infra.serving.weights.manifest import CHAINS, MANIFEST, parse_file_key, read_manifest
from ostinato.tasks.realtime.promotion.standing import CanaryStanding

MOST_STEPS = 400  # points of a curve
MOST_VERSIONS = 40  # of a chain
MOST_CHAINS = 3
MOST_CYCLES = 20
MOST_PAGES = 100


class WeightVersion(Record):
    """One committed version of a weight chain."""

    chain: str
    version: int
    kind: str = Field(description="anchor or delta")
    stored_bytes: int
    published_at: float


class StageProgress(Record):
    """Progress of a running stage."""

    part: str
    done: float
    total: float
    message: str


class Snapshot(Record):
    """All that the page draws."""

    at: float
    parts: tuple[StatusRow, ...]
    stages: tuple[StageProgress, ...] = Field(description="that run now")
    curves: tuple[Curve, ...]
    chains: tuple[tuple[WeightVersion, ...], ...] = Field(
        description="versions of a chain, oldest first; newest chain first"
    )
    cycles: tuple[CycleRow, ...] = Field(description="newest first")
    promotions: tuple[PromotionRow, ...] = Field(description="newest first")
    canaries: tuple[CanaryStanding, ...] = Field(description="that are open")
    pages: tuple[str, ...] = Field(description="reports below /reports/, newest first")


class SnapshotReader:
    """Takes snapshots of one home. What never changes is read once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._versions: dict[tuple[str, int], WeightVersion] = {}

    def take(self) -> Snapshot:
        """A snapshot. A store or ledger that fails is a part with a fault and leaves its lists empty."""
        home, parts = self._settings.home, tuple(collect(self._settings))
        has_ledger = any(row.part == "ledger" and row.state == "up" for row in parts)
        cycles, promotions = self._read_ledger() if has_ledger else ((), ())
        return Snapshot(
            at=time.time(),
            parts=parts,
            stages=tuple(_running_stages(home, parts)),
            curves=tuple(_newest_curves(home)),
            chains=self._newest_chains(),
            cycles=cycles,
            promotions=promotions,
            canaries=self._read_canaries() if has_ledger else (),
            pages=tuple(_pages(home)),
        )

    def _read_ledger(self) -> tuple[tuple[CycleRow, ...], tuple[PromotionRow, ...]]:
        try:
            with contextlib.closing(open_ledger(self._settings)) as ledger:
                lines = ledger.promotions.lines()
                promotions = [row for line in lines for row in ledger.promotions.history(line)]
                cycles = [row for line in lines for row in ledger.cycles.history(line)]
        except StorageError:
            return (), ()
        cycles.sort(key=lambda row: -row.opened_at)
        promotions.sort(key=lambda row: -row.at)
        return tuple(cycles[:MOST_CYCLES]), tuple(promotions[:MOST_CYCLES])

    def _read_canaries(self) -> tuple[CanaryStanding, ...]:
        try:
            up = RunningUp(self._settings, ProcessTable())
            return tuple(open_canaries(self._settings, up, time.time()))
        except StorageError:
            return ()

    def _newest_chains(self) -> tuple[tuple[WeightVersion, ...], ...]:
        try:
            objects = open_object_store(self._settings)
            chains: dict[str, list[int]] = defaultdict(list)
            for chain, version, name in filter(None, map(parse_file_key, objects.list(CHAINS))):
                if name == MANIFEST:
                    chains[chain].append(version)
            read = [
                tuple(self._version(objects, chain, v) for v in sorted(versions)[-MOST_VERSIONS:])
                for chain, versions in chains.items()
            ]
        except StorageError:
            return ()
        read.sort(key=lambda versions: -versions[-1].published_at)
        return tuple(read[:MOST_CHAINS])

    def _version(self, objects: ObjectStore, chain: str, version: int) -> WeightVersion:
        if (chain, version) not in self._versions:
            manifest = read_manifest(objects, chain, version)
            self._versions[chain, version] = WeightVersion(
                chain=chain,
                version=version,
                kind=manifest.kind,
                stored_bytes=manifest.stored_bytes,
                published_at=manifest.published_at,
            )
        return self._versions[chain, version]


def _running_stages(home: Path, parts: tuple[StatusRow, ...]) -> Iterator[StageProgress]:
    for row in parts:
        run, _, stage = row.part.partition(" ")
        if row.state != "running" or not stage or " " in stage:
            continue
        progress = read_record(home / "runs" / run / stage / PROGRESS, Progress)
        if progress is not None:
            yield StageProgress(
                part=row.part, done=progress.done, total=progress.total, message=progress.message
            )


def _newest_curves(home: Path) -> list[Curve]:
    """Curves of the RL stage and of the loss whose metrics changed last."""
    files = sorted(home.glob(f"runs/*/*/{METRICS}"), key=_changed_at, reverse=True)
    curves: list[Curve] = []
    has_steps = has_losses = False
    for path in files:
        if has_steps and has_losses:
            break
        rows: list[dict[str, Any]] = [dict(row) for row in read_metrics(path)]
        if not has_steps:
            found = rl_curves(_thin([row for row in rows if "solve_rate" in row]))
            has_steps, curves = bool(found), curves + found
        losses = _thin([row for row in rows if "loss" in row and "solve_rate" not in row])
        if losses and not has_losses:
            has_losses = True
            title = f"loss of {path.parent.parent.name} {path.parent.name.partition('-')[0]}"
            curves += [
                curve.model_copy(update={"title": title})
                for curve in training_curves(losses)
                if curve.key == "loss"
            ]
    return curves


def _thin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOST_STEPS rows, evenly spread, the last one among them."""
    every = -(-len(rows) // MOST_STEPS) or 1
    return rows[::-1][::every][::-1]


def _pages(home: Path) -> list[str]:
    folder = home / "reports"
    found = sorted(folder.rglob("*.html"), key=_changed_at, reverse=True)
    return [path.relative_to(folder).as_posix() for path in found[:MOST_PAGES]]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
