"""Real-time cycles under `ostinato up` while something dies every other minute; each cycle is accounted for at the end.

`python -m tests.faults.soak --minutes 45 --cycle-minutes 5 --fault-minutes 2 --seed 0 --out DIR` trains the
miniature chain in a home of its own first (`--home`: unless it is finished there) and writes DIR/soak.json and
DIR/soak.md. Exit code 1: a law is broken.
"""

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from ostinato.flows.chat.command import LOCAL_TENANT
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.record import Record
from ostinato.infra.serving.gateway.tenants import local_tenants
from tests.fakes.prefect_here import wait_until
from tests.faults.soak_faults import CYCLE, FAULTS, Missed, Target
from tests.faults.soak_laws import (
    AT_WORK,
    Fault,
    Run,
    account,
    broken_when_down,
    broken_while_up,
    home_bytes,
)
from tests.faults.test_up import Machine

RECIPE = "miniature"
_ENDS = ("COMPLETED", "FAILED", "CANCELLED")
_END_SECONDS = 1_200.0  # for a run that crashed several times: its pauses double
_VISIT_SECONDS = 15.0
# 67.5 MB were seen: 33.4 in the run folder with its step checkpoint, 8.9 in the store, 8.9 as local copy and 16.3 in its
# weight chain; the rest is for Prefect's database and logs
_BYTES_PER_CYCLE = 80 * 10**6


class Soak(Record):
    """Result of a soak."""

    seed: int
    minutes: float
    runs: tuple[Run, ...]
    faults: tuple[Fault, ...]
    visits: int
    visits_answered: int
    bytes_before: int
    bytes_after: int
    broken: tuple[str, ...]


class Visitor(threading.Thread):
    """A user who asks the gateway something four times a minute, and counts the answers."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(daemon=True)
        self._machine = machine
        self._leave = threading.Event()
        self.visits = self.answered = 0

    def run(self) -> None:
        while not self._leave.wait(_VISIT_SECONDS):
            self.visits += 1
            self.answered += self.ask()

    def ask(self) -> bool:
        settings = self._machine.settings
        tenant = local_tenants(settings.home, (LOCAL_TENANT,))[LOCAL_TENANT]
        try:
            answer = httpx2.post(
                f"http://127.0.0.1:{settings.gateway_port}/v1/chat/completions",
                headers={"Authorization": f"Bearer {tenant.api_keys[0].get_secret_value()}"},
                json={
                    "model": "ostinato",
                    "messages": [{"role": "user", "content": "def add(a, b):"}],
                    "max_tokens": 8,
                },
                timeout=60,
            )
        except httpx2.HTTPError:
            return False
        return answer.is_success

    def leave(self) -> None:
        self._leave.set()
        self.join()


def inject(target: Target, faults: list[Fault], limit: float) -> None:
    """One fault, of those that were injected least often. Another is taken when one finds nothing to hit, until
    the limit has passed.
    """
    used = Counter(fault.name for fault in faults)
    names = sorted(FAULTS, key=lambda name: (used[name], target.dice.random()))
    while time.time() < limit:
        for name in names:
            since = time.time()
            try:
                hit = FAULTS[name](target)
            except (Missed, httpx2.HTTPError) as error:
                _say(f"{name}: not now, {error}")
                continue
            faults.append(Fault(name=name, at=since, until=time.time(), hit=hit))
            _say(f"{name}: {hit}")
            return
        time.sleep(1)


def settle(target: Target) -> Iterator[str]:
    """Ends the schedule, waits for what runs, then one cycle that nothing disturbs. What did not end."""
    target.set_schedule(active=False)

    def is_quiet() -> bool:
        # a crashed one begins again
        is_over = all(run["state_type"] in _ENDS for run in target.cycles())
        return is_over and not target.runs(state=AT_WORK) and not target.stages()

    try:
        wait_until("rest", is_quiet, _END_SECONDS)
    except AssertionError as error:
        yield str(error)
    deployment = target.ask(lambda: target.here.deployment(CYCLE))["id"]
    last = target.ask(lambda: target.here.start(deployment))

    def is_over() -> bool:
        return target.ask(lambda: target.here.state(last))["type"] in _ENDS

    try:
        wait_until("last", is_over, 600)
    except AssertionError:
        yield "an undisturbed cycle did not end within 600 s"


def soak(
    home: Path, out: Path, minutes: float, cycle_minutes: float, fault_minutes: float, seed: int
) -> Soak:
    """Runs all of it."""
    out.mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    machine = Machine(home, RECIPE)
    line = load_recipe(RECIPE).serving.line
    assert line is not None
    _say("the miniature chain, unless it is finished")
    with (out / "demo.log").open("w") as log:
        assert machine.start("demo", "--recipe", RECIPE, output=log).wait() == 0
    size = home_bytes(home)
    target = Target(machine, line, out / "up.log", cycle_minutes * 60, random.Random(seed))
    faults: list[Fault] = []
    broken: list[str] = []
    visitor = Visitor(machine)
    try:
        target.start_up()
        wait_until("an answer of the gateway", visitor.ask, 300)
        visitor.start()
        end = target.began + minutes * 60
        period = fault_minutes * 60
        for number in range(int(minutes / fault_minutes)):
            at = target.began + (number + target.dice.random()) * period
            time.sleep(max(0.0, at - time.time()))
            inject(target, faults, at + period)
        time.sleep(max(0.0, end - time.time()))
        until = time.time()
        _say("no more faults")
        broken += settle(target)
        visitor.leave()
        runs = account(target, faults, until)
        broken += [f"{run.name}: {run.finding}" for run in runs if run.finding]
        if runs[-1].state != "COMPLETED":
            broken.append(f"the undisturbed cycle ended {runs[-1].state}: {runs[-1].message}")
        broken += broken_while_up(target)
        if not visitor.ask():
            broken.append("the gateway answers no chat completion")
    finally:
        machine.start("down", output=sys.stderr.fileno()).wait(240)
    broken += broken_when_down(machine.settings, line)
    grown, num_cycles = home_bytes(home) - size, len({name for run in runs for name in run.cycles})
    if grown > _BYTES_PER_CYCLE * (num_cycles + 1):
        broken.append(f"the home grew by {grown:,} bytes in {num_cycles} cycles")
    return Soak(
        seed=seed,
        minutes=minutes,
        runs=tuple(runs),
        faults=tuple(faults),
        visits=visitor.visits,
        visits_answered=visitor.answered,
        bytes_before=size,
        bytes_after=size + grown,
        broken=tuple(broken),
    )


def table(result: Soak) -> str:
    """The soak as markdown."""
    rows = [
        "| due | flow run | state | starts | minutes | cycles of the ledger | faults meanwhile |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in result.runs:
        state = run.state + (" (one ran)" if "concurrency" in run.message else "")
        took = f"{(run.ended - run.began) / 60:.1f}" if run.began and run.ended else "-"
        cells = [_clock(run.due), run.name, state, str(run.starts), took]
        rows.append(f"| {' | '.join([*cells, ', '.join(run.cycles), ', '.join(run.faults)])} |")
    rows += ["", "| at | fault | hit |", "| --- | --- | --- |"]
    rows += [f"| {_clock(one.at)} | {one.name} | {one.hit} |" for one in result.faults]
    states = Counter(run.state for run in result.runs)
    rows += [
        "",
        f"Seed {result.seed}, {result.minutes:g} minutes, {len(result.faults)} faults, "
        f"{len(result.runs)} cycles: {', '.join(f'{n} {s}' for s, n in sorted(states.items()))}.",
        f"Visits answered: {result.visits_answered} of {result.visits}. The home grew from "
        f"{result.bytes_before / 1e6:.0f} to {result.bytes_after / 1e6:.0f} MB.",
        "Laws broken: " + ("; ".join(result.broken) or "none") + ".",
    ]
    return "\n".join(rows) + "\n"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, tz=UTC).strftime("%H:%M:%S")


def _say(text: str) -> None:
    sys.stdout.write(f"{datetime.now(tz=UTC):%H:%M:%S} {text}\n")
    sys.stdout.flush()


def write(result: Soak, out: Path) -> None:
    (out / "soak.json").write_text(json.dumps(result.model_dump(mode="json"), indent=1))
    (out / "soak.md").write_text(table(result))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--cycle-minutes", type=float, default=5)
    parser.add_argument("--fault-minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--home", type=Path, help="OUT/home when absent")
    given = parser.parse_args(arguments)
    out = given.out.absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `ostinato down` is run then too
    result = soak(
        (given.home or out / "home").absolute(),
        out,
        given.minutes,
        given.cycle_minutes,
        given.fault_minutes,
        given.seed,
    )
    write(result, out)
    _say("cycles and faults:\n" + table(result))
    return 1 if result.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
