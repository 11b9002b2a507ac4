"""All rows of `ostinato status`. Parts are probed in parallel with a time limit, so that a hanging part does not delay
the others.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import httpx2
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ostinato.flows.operating.status.flow_runs import PrefectRows
from ostinato.flows.operating.status.ledger import (
    canary_rows,
    champion_rows,
    ledger_rows,
    unusable_ledger,
)
from ostinato.flows.operating.status.processes import ProcessTable
from ostinato.flows.operating.status.rows import StatusRow, Thresholds, first_line
from ostinato.flows.operating.status.services import (
    UpProcess,
    disk_row,
    gateway_row,
    server_row,
    slow_store,
    store_row,
    upload_rows,
)
from ostinato.flows.operating.status.stages import StageRows
from ostinato.flows.stages.console import as_printable
from ostinato.flows.stages.server_access import is_own_server, open_api, own_access
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings

_LAST_SECONDS = 1.0  # time for making the rows, beyond the limit of an answer


def collect(settings: Settings, thresholds: Thresholds | None = None) -> list[StatusRow]:
    """Every part of this machine: services, flow runs, storage, cycles, then stages, newest last."""
    limits = thresholds or Thresholds()
    now = time.time()
    processes = ProcessTable()
    up = UpProcess(settings, processes)
    stages = StageRows(settings.home, processes, now, limits)
    gateway = f"http://127.0.0.1:{settings.gateway_port}/healthz"

    def flow_runs() -> Iterator[StatusRow]:
        if not is_own_server(settings.prefect_port, settings.home):
            return
        with open_api(own_access(settings, settings.prefect_port), limits.answer) as client:
            prefect = PrefectRows(
                client, up, processes, home=settings.home, now=now, thresholds=limits
            )
            yield from prefect.rows()

    def idle_seconds(cycle: CycleRow) -> float | None:
        # a database that several machines share does not record the other machines' stages
        is_here = settings.ledger_url.get_secret_value().startswith("sqlite")
        return stages.idle_seconds(cycle.opened_at) if is_here else None

    probes = [
        Probe("server", lambda: [server_row(up, settings, now, limits)]),
        Probe("gateway", lambda: [gateway_row(up, gateway, limits)]),
        Probe("flow runs", flow_runs),
        Probe("disk", lambda: [disk_row(settings)]),
        Probe("store", lambda: [store_row(settings, limits)]),
        Probe("ledger", lambda: ledger_rows(settings, limits, idle_seconds)),
        Probe("champion", lambda: champion_rows(settings)),
        Probe("canary", lambda: canary_rows(settings, up, now)),
        Probe("chain", lambda: upload_rows(open_object_store(settings), now, limits)),
        Probe("stages", stages.rows),
    ]
    deadline = time.monotonic() + limits.answer + _LAST_SECONDS
    found = {probe.part: probe.rows_by(deadline) for probe in probes}
    return up.rows() + _without_repeats(found, limits)


def print_rows(rows: Sequence[StatusRow], console: Console) -> None:
    """Prints a table of all parts and, below it, the findings. Empty columns are left out."""
    now = time.time()
    columns = {
        "part": [row.part for row in rows],
        "state": [row.state for row in rows],
        "waits for": [row.waits_for for row in rows],
        "since": [ago(row.since, now) for row in rows],
        "likely cause": [row.cause for row in rows],
        "progress": [row.progress for row in rows],
    }
    table = Table()
    shown = {name: texts for name, texts in columns.items() if any(texts)}
    for name in shown:
        table.add_column(name, overflow="fold")
    for row, texts in zip(rows, zip(*shown.values(), strict=True), strict=True):
        table.add_row(
            *(escape(as_printable(text)) for text in texts),
            style="red" if row.fault is not None else None,
        )
    console.print(table)
    found = as_printable(f"findings: {_findings(rows) or 'none'}")
    console.out(found, highlight=False)


def in_a_sentence(rows: Sequence[StatusRow]) -> str:
    """The running stages and the findings, such as `reinforcement of nano-seed0 is at step 12 of 26; nothing needs
    you.`
    """
    running = ", ".join(row.doing for row in rows if row.doing) or "no stage runs"
    findings = _findings(rows)
    return f"{running}; {f'needs you: {findings}' if findings else 'nothing needs you'}."


def _findings(rows: Sequence[StatusRow]) -> str:
    return ", ".join(f"{row.fault} ({row.part})" for row in rows if row.fault is not None)


def ago(instant: float | None, now: float) -> str:
    """The age of an instant in words. Empty for None."""
    if instant is None:
        return ""
    seconds = max(0.0, now - instant)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


class Probe:
    """A query about one part, started in a thread at construction."""

    def __init__(self, part: str, ask: Callable[[], Iterable[StatusRow]]) -> None:
        self.part = part
        self._ask = ask
        self._rows: list[StatusRow] = []
        # daemon, so that a part that never answers does not keep the command from ending
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def rows_by(self, deadline: float) -> list[StatusRow]:
        """The rows, or one row that says that no answer came in time or that the query failed."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return [StatusRow(part=self.part, state=SILENT)]
        return self._rows

    def _run(self) -> None:
        try:
            self._rows = list(self._ask())
        except (OstinatoError, OSError, httpx2.HTTPError, sqlite3.Error) as error:
            self._rows = [StatusRow(part=self.part, state=FAILING, progress=first_line(error))]


SILENT, FAILING = "silent", "failing"


def _without_repeats(found: dict[str, list[StatusRow]], limits: Thresholds) -> list[StatusRow]:
    """The rows in their order, without faults that another part's row already reports."""
    if _is_state(found["store"], SILENT):
        found["store"] = [slow_store(f"no answer within {limits.answer:.0f} s")]
    if _is_state(found["ledger"], SILENT):
        found["ledger"] = [unusable_ledger(f"no answer within {limits.answer:.0f} s")]
    sources = {"flow runs": ("server",), "chain": ("store",), "champion": ("store", "ledger")}
    sources["canary"] = ("ledger",)
    rows = []
    for part, own in found.items():
        is_unasked = _is_state(own, SILENT) or _is_state(own, FAILING)
        is_repeat = any(
            row.state != "up" for source in sources.get(part, ()) for row in found[source]
        )
        if not (is_unasked and is_repeat):
            rows += own
    return rows


def _is_state(rows: list[StatusRow], state: str) -> bool:
    return len(rows) == 1 and rows[0].state == state
