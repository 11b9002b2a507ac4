"""Real-time cycles under `ostinato up`, into each of which one kill falls at a drawn moment, and the laws that hold
afterwards: each cycle ends as it would have without the kill.
"""

import contextlib
import itertools
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2

from ostinato.flows.operating.local_prefect import prefect_environment
from ostinato.infra.platform.cluster.services import ServiceGroup
from ostinato.infra.platform.cluster.workspace import (
    PROGRESS,
    REQUEST,
    RESULT,
    Progress,
    RequestEnvelope,
    read_record,
)
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings
from tests.fakes.cycle_home import LINE, make_cycle_home
from tests.fakes.prefect_here import PrefectHere, open_api, wait_until
from tests.faults.drawn_kills import DrawnKills
from tests.faults.soak_laws import broken_when_down
from tests.faults.test_up import Machine

CYCLE = "realtime-cycle/every-5-hours"
# A stage of the cycle that is under way, by a part of its entry and of its last message, the longest pause before the
# kill, and the kind of process that every second kill waits for and hits, since it lives for a second or two.
# The last moment is the gate's: the candidate's evaluation has ended.
MOMENTS = {
    "users": ("realtime.traffic", "", 12.0, "bwrap"),
    "collect and distil": ("cycle_training", "", 6.0, ""),
    "train": ("cycle_training", "training", 8.0, "rank"),
    "evaluate": ("evaluation.checkpoint.run", "", 12.0, "bwrap"),
    "ship": ("evaluation.checkpoint.run", RESULT, 1.5, ""),
}
ENDS = ("COMPLETED", "FAILED", "CANCELLED")
_CYCLE_SECONDS = (
    1_800.0  # a killed server or flow is waited for, and Ray starts slowly on a busy machine
)


class KilledCycles:
    """`ostinato up` on a home of its own, with cycles that are started by hand."""

    def __init__(self, home: Path, seed: int) -> None:
        self.kills = DrawnKills(home, seed)
        self.tries: Counter[str] = Counter()  # by moment
        self.machine = Machine(home, str(home / "killed.toml"))
        self.parameters = make_cycle_home(home)
        settings = self.machine.settings
        told = prefect_environment(settings, settings.prefect_port)
        self.here = PrefectHere(
            settings, settings.prefect_port, told, ServiceGroup(), open_api(told)
        )
        self.log = home / "up.log"
        self.up: subprocess.Popen[str]
        self.start_up()

    def start_up(self) -> None:
        with self.log.open("a") as log:
            begin = log.tell()
            self.up = self.machine.start(
                "up", "--recipe", self.machine.recipe, "--line", LINE, output=log
            )

        def is_up() -> bool:
            said = self.log.read_text()[begin:]
            assert self.up.poll() is None, said
            return "Ctrl-C ends" in said

        wait_until("up", is_up, 600)

    def run_cycle(self, moment: str) -> str:
        """Starts a cycle, kills once, and waits for its end. Returns what was killed."""
        before = set(self._stages())
        run = self.here.start(self.here.deployment(CYCLE)["id"], **self.parameters)
        part, message, longest, kind = MOMENTS[moment]

        def has_come() -> bool:
            found = self.here.state(run)
            is_at = self._is_at(before, part, message)
            assert is_at or found["type"] not in ENDS, f"the cycle ended unseen before {moment}"
            return is_at

        wait_until(moment, has_come, _CYCLE_SECONDS)
        self.tries[moment] += 1
        if kind and self.tries[moment] % 2:
            wait_until(kind, lambda: self.kills.lives(kind) or self._has_ended(run), _CYCLE_SECONDS)
            killed = self.kills.kill(kind)
        else:
            time.sleep(self.kills.dice.uniform(0, longest))
            killed = self.kills.kill()
        if killed == "all":
            self.up.wait()
            self.start_up()

        def state() -> dict | None:
            with contextlib.suppress(httpx2.HTTPError):  # the server is away
                found = self.here.state(run)
                return found if found["type"] in ENDS else None
            return None

        end = wait_until(f"end of the cycle after {killed} at {moment}", state, _CYCLE_SECONDS)
        assert end["type"] == "COMPLETED", (moment, killed, end)
        return killed

    def _has_ended(self, run: str) -> bool:
        return self.here.state(run)["type"] in ENDS

    def _stages(self) -> list[Path]:
        """Directories of stages, begun ones."""
        return sorted(path.parent for path in self.machine.home.glob(f"runs/*/*/{REQUEST}"))

    def _is_at(self, before: set[Path], part: str, message: str) -> bool:
        for stage in self._stages():
            envelope = read_record(stage / REQUEST, RequestEnvelope)
            if stage in before or envelope is None or part not in envelope.entry:
                continue
            if message == RESULT:
                # of the candidate: the champion's was there, or is the first of this home
                checkpoint = envelope.request["checkpoint_name"]
                if checkpoint.startswith("candidate") and (stage / RESULT).exists():
                    return True
            elif not message or _message_of(stage) == message:
                return True
        return False

    def end(self) -> None:
        self.machine.start("down", output=subprocess.DEVNULL).wait(240)


def _message_of(stage: Path) -> str:
    progress = read_record(stage / PROGRESS, Progress)
    return "" if progress is None else progress.message


def broken_laws(settings: Settings, count: int) -> Iterator[str]:
    """What `count` cycles that nothing disturbed would not have left."""
    with contextlib.closing(open_ledger(settings)) as ledger:
        cycles = ledger.cycles.history(LINE)
        promotions = ledger.promotions.history(LINE)
    if len(cycles) != count:
        yield f"{len(cycles)} cycles, wanted {count}"
    for before, after in itertools.pairwise(cycles):
        if after.from_watermark != before.to_watermark:
            yield f"{after.cycle_id} does not begin where {before.cycle_id} ended"
    outcomes = [cycle.outcome for cycle in cycles]
    if set(outcomes) != {"promoted"}:
        yield f"outcomes are {outcomes}, wanted promoted"
    wanted = ["reinforced/killed@1", *(f"candidate/killed@{n + 1}" for n in range(count))]
    published = [row.checkpoint_id for row in promotions]
    if published != wanted:
        yield f"the line served {published}, wanted {wanted}"
    yield from broken_when_down(settings, LINE)
