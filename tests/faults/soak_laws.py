"""What a soak came to: one row per cycle that was due, and the laws that hold whatever the faults were."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

import psutil

from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.weights.manifest import CHAINS, list_versions
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from tests.fakes.processes import command_line, of_home, wait_for_end
from tests.faults.soak_faults import Target

AT_WORK = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}
_SECOND_TRIGGER = "concurrency limit"  # in the message of a run that was dropped: one ran already


class Fault(Record):
    """A fault that was injected, or found nothing to hit."""

    name: str
    at: float
    until: float
    hit: str


class Run(Record):
    """A due cycle: the flow run and what the ledger says about its time."""

    due: float
    name: str
    run_id: str
    state: str
    starts: int
    began: float | None
    ended: float | None
    message: str
    cycles: tuple[str, ...]
    faults: tuple[str, ...]
    finding: str  # empty: accounted for


def account(target: Target, faults: Sequence[Fault], until: float) -> list[Run]:
    """A row per flow run, and one per scheduled moment without any, in order."""
    with closing(open_ledger(target.machine.settings)) as ledger:
        history = ledger.cycles.history(target.line)
    rows = [_row(run, history, faults, target.cancelled) for run in target.cycles()]
    due = [row.due for row in rows]
    for number in range(1, math.floor((until - target.began) / target.cycle_seconds) + 1):
        at = target.began + number * target.cycle_seconds
        if not any(abs(other - at) < 2 for other in due):
            is_away = any(begin <= at <= end + 10 for begin, end in target.away)
            finding = "" if is_away else "no flow run, and `ostinato up` ran"
            rows.append(_missing(at, finding))
    return sorted(rows, key=lambda row: row.due)


def _row(
    run: dict, history: Sequence[CycleRow], faults: Sequence[Fault], cancelled: set[str]
) -> Run:
    began, ended = _instant(run["start_time"]), _instant(run["end_time"])
    until = ended or math.inf
    state, message = run["state_type"], run["state"]["message"] or ""
    is_dropped = state == "CANCELLED" and (_SECOND_TRIGGER in message or run["id"] in cancelled)
    return Run(
        due=_instant(run["expected_start_time"]) or 0.0,
        name=run["name"],
        run_id=run["id"],
        state=state,
        starts=run["run_count"],
        began=began,
        ended=ended,
        message=message,
        cycles=tuple(
            f"{one.cycle_id.rpartition('-')[0]} ({one.from_watermark}, {one.to_watermark}] "
            f"{one.outcome or 'open'}"
            for one in history
            if began
            and run["run_count"]
            and one.opened_at < until
            and (one.closed_at or math.inf) > began
        ),
        faults=tuple(one.name for one in faults if began and one.at < until and one.until > began),
        finding="" if state == "COMPLETED" or is_dropped else f"ended {state}: {message}",
    )


def _missing(at: float, finding: str) -> Run:
    return Run(
        due=at,
        name="-",
        run_id="",
        state="not scheduled, no `up`",
        starts=0,
        began=None,
        ended=None,
        message="",
        cycles=(),
        faults=(),
        finding=finding,
    )


def _instant(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def broken_while_up(target: Target) -> Iterator[str]:
    """Laws of a home at rest, `ostinato up` still running."""
    for run in target.runs(state=AT_WORK):
        yield f"flow run {run['name']} is {run['state_type']} though nothing runs"

    def working() -> list[psutil.Process]:
        found = of_home(target.machine.home)
        words = ("child_main", "prefect.engine")
        return [one for one in found if any(word in command_line(one) for word in words)]

    try:
        wait_for_end(working, 60)  # an engine reports its last state before it exits
    except AssertionError as left:
        yield f"processes are left: {left}"
    with closing(open_ledger(target.machine.settings)) as ledger:
        cycles = ledger.cycles.history(target.line)
        promotions = ledger.promotions.history(target.line)
    for before, after in itertools.pairwise(cycles):
        if after.from_watermark != before.to_watermark:
            yield f"{after.cycle_id} does not begin where {before.cycle_id} ended"
    for cycle in cycles:
        if cycle.closed_at is None:
            yield f"{cycle.cycle_id} is open"
    candidates = [
        one.stages["promotion"]["candidate"] for one in cycles if "promotion" in one.stages
    ]
    for name in set(candidates):
        if candidates.count(name) > 1:
            yield f"{name} is the candidate of several cycles"
    promoted = [one.checkpoint_id for one in promotions if one.action == "promote"]
    for name in set(promoted):
        if promoted.count(name) > 1:
            yield f"{name} was promoted {promoted.count(name)} times"
    won = sum(cycle.outcome == "promoted" for cycle in cycles)
    if won != sum(name.startswith("candidate/") for name in promoted):
        yield f"{won} cycles say promoted, wanted as many as candidates among {promoted}"


def broken_when_down(settings: Settings, line: str) -> Iterator[str]:
    """Laws of a home after `ostinato down`."""
    for process in of_home(settings.home):
        yield f"process {process.pid} is left: {command_line(process)[:200]}"
    home = str(settings.home)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    yield from (f"mount is left: {mount}" for mount in mounts if home in mount)
    objects = open_object_store(settings)
    with closing(open_ledger(settings)) as ledger:
        champion = ledger.promotions.current(line)
        assert champion is not None
        store = open_artifacts(settings, ledger)
        ref = store.get(champion.checkpoint_id)
        for one in (ref, *store.lineage(ref)):
            yield from (f"{one}: {damage}" for damage in store.find_damage(one))
    for chain in sorted({key.removeprefix(CHAINS).split("/")[0] for key in objects.list(CHAINS)}):
        subscriber = ChainSubscriber(objects, chain)
        for version in list_versions(objects, chain):
            subscriber.fetch(version)  # verifies


def home_bytes(home: Path) -> int:
    """Size of everything in a home."""
    return sum(path.lstat().st_size for path in home.rglob("*") if path.is_file())
