"""Snapshot of the dashboard's content: runs, parts, weight versions, cycles, canaries.

It is read from the home's files, the object store and the ledger, as by `ostinato status`. Running services are asked
only for their health.
"""

import contextlib
import time
from pathlib import Path

from pydantic import Field

from ostinato.flows.operating.dashboard.runs import RunSummary, changed_at, list_runs
from ostinato.flows.operating.status.ledger import open_canaries
from ostinato.flows.operating.status.processes import ProcessTable
from ostinato.flows.operating.status.report import collect, in_a_sentence
from ostinato.flows.operating.status.rows import StatusRow
from ostinato.flows.operating.status.services import UpProcess
from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import CycleRow, PromotionRow
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.weights.manifest import CHAINS, MANIFEST, parse_file_key, read_manifest
from ostinato.tasks.realtime.promotion.canary_status import CanaryStatus

MAX_CHAINS = 20
MAX_CYCLES = 20
MAX_PAGES = 100


class WeightVersion(Record):
    """One committed version of a weight chain."""

    chain: str
    version: int
    kind: str = Field(description="anchor or delta")
    stored_bytes: int
    published_at: float


class DashboardSnapshot(Record):
    """Content of the page at one time."""

    at: float
    sentence: str = Field(
        description="sentence about the running stages and about what needs the user"
    )
    parts: tuple[StatusRow, ...]
    runs: tuple[RunSummary, ...] = Field(description="stages with metrics, newest first")
    versions: tuple[WeightVersion, ...] = Field(
        description="newest version of each chain, newest first"
    )
    cycles: tuple[CycleRow, ...] = Field(description="newest first")
    promotions: tuple[PromotionRow, ...] = Field(description="newest first")
    canaries: tuple[CanaryStatus, ...] = Field(description="open canaries")
    pages: tuple[str, ...] = Field(description="reports below /reports/, newest first")
    prefect_url: str = Field(description="page of this home's Prefect server")


class SnapshotReader:
    """Reader of a home's snapshots. Committed weight versions never change, so they are read once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._versions: dict[tuple[str, int], WeightVersion] = {}

    def take(self) -> DashboardSnapshot:
        """A new snapshot. A failing store or ledger is a part with a fault, and its lists are empty."""
        home, parts = self._settings.home, tuple(collect(self._settings))
        has_ledger = any(row.part == "ledger" and row.state == "up" for row in parts)
        cycles, promotions = self._read_ledger() if has_ledger else ((), ())
        return DashboardSnapshot(
            at=time.time(),
            sentence=in_a_sentence(parts),
            parts=parts,
            runs=tuple(list_runs(home, {row.part: row for row in parts})),
            versions=self._newest_versions(),
            cycles=cycles,
            promotions=promotions,
            canaries=self._read_canaries() if has_ledger else (),
            pages=tuple(_pages(home)),
            prefect_url=f"http://127.0.0.1:{self._settings.prefect_port}/",
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
        return tuple(cycles[:MAX_CYCLES]), tuple(promotions[:MAX_CYCLES])

    def _read_canaries(self) -> tuple[CanaryStatus, ...]:
        try:
            up = UpProcess(self._settings, ProcessTable())
            return tuple(open_canaries(self._settings, up, time.time()))
        except StorageError:
            return ()

    def _newest_versions(self) -> tuple[WeightVersion, ...]:
        try:
            objects = open_object_store(self._settings)
            newest: dict[str, int] = {}
            for chain, version, name in filter(None, map(parse_file_key, objects.list(CHAINS))):
                if name == MANIFEST:
                    newest[chain] = max(version, newest.get(chain, version))
            read = [self._version(objects, chain, version) for chain, version in newest.items()]
        except StorageError:
            return ()
        read.sort(key=lambda version: -version.published_at)
        return tuple(read[:MAX_CHAINS])

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


def _pages(home: Path) -> list[str]:
    folder = home / "reports"
    found = sorted(folder.rglob("*.html"), key=changed_at, reverse=True)
    return [path.relative_to(folder).as_posix() for path in found[:MAX_PAGES]]
