"""An independent check of a test run: plain pytest, one process per test file, in a box of its own.

It shares no process, import or result channel with the test server, so an attack on one does not work
on the other. Every process also runs canaries made for it alone: tests with random names, each made to pass
or fail at random. A run that forges outcomes guesses all of them right with probability 1 in 65,536. It
is slow (an interpreter start per test file), so it confirms passes that matter and gives no feedback.
"""

import json
import random
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ostinato.infra.platform.errors import SandboxNotFound
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH
from ostinato.infra.sandbox.host.system import build_later_clock
from ostinato.infra.sandbox.inside.sources import argument_of, make_options
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository

_CANARIES = 16
# a fixture failed, or the time limit was reached
_UNMEASURED = frozenset((TestOutcome.ERROR, TestOutcome.TIMEOUT))
_FOLDER = "/tmp/second"
_CLOCK = f"{_FOLDER}/later_clock.so"
_SETTINGS = b"[pytest]\nmarkers =\n"
_OPTIONS = (
    f"-p no:cacheprovider -c {_FOLDER}/pytest.ini --rootdir=/repo --confcutdir=/repo "
    "--import-mode=prepend -W ignore --tb=no -q"
)
_REPORTER = Path(__file__).with_name("plain_reporter.py")
_START_SLACK = 6  # each process starts an interpreter, and waiting for a CPU counts too


async def run_plainly(
    repository: PreparedRepository,
    files: Mapping[str, bytes | None],
    test_ids: Sequence[str],
    time_limit_seconds: float,
    *,
    later: bool = False,
) -> TestReport:
    """Runs tests on the pristine repository with the editable ones of `files` written over it. If a canary had an
    error or a timeout, every pass of its process becomes a TIMEOUT, because the run measured nothing.

    `later`: the clock of the tests is 404 days ahead, in the easternmost time zone.
    """
    started = time.perf_counter()
    rng = random.SystemRandom()
    outcomes = dict.fromkeys(test_ids, TestOutcome.MISSING)
    violations: list[str] = []
    limits = SandboxLimits(memory_bytes=2 << 30)
    async with open_box(repository, repository.keep_editable(files), limits) as sandbox:
        for path in dict.fromkeys(test.partition("::")[0] for test in test_ids):
            await sandbox.exec(f"mkdir -p {_FOLDER}", 10.0)
            await sandbox.write(f"{_FOLDER}/pytest.ini", _SETTINGS)
            if later:
                await sandbox.write(_CLOCK, build_later_clock().read_bytes())
            wanted = _draw_canaries(rng)
            canaries, reporter = (f"{kind}_{rng.getrandbits(48):x}" for kind in ("test", "run"))
            place = f"{_FOLDER}/{canaries}.py"
            options = make_options(REPOSITORY_PATH, repository.collection_rules, " ".join(wanted))
            await sandbox.write(place, _canary_text(wanted, rng))
            own_tests = [test for test in test_ids if test.partition("::")[0] == path]
            full = f"{REPOSITORY_PATH}/{path}"
            request = {
                "files": [full, place],
                "key": f"{rng.getrandbits(128):x}",
                "tests": own_tests,
                "canaries": f"{canaries}.py",
                "answer": f"{_FOLDER}/{reporter}.answer",
            }
            await sandbox.write(f"{_FOLDER}/{reporter}.py", _REPORTER.read_bytes())
            await sandbox.write(f"{_FOLDER}/{reporter}.json", json.dumps(request).encode())
            clock = f"TZ=EAST-14 LD_PRELOAD={_CLOCK} " if later else ""
            command = (
                f"{clock}PYTHONPATH=$PYTHONPATH:{_FOLDER} python -m pytest -p {reporter} "
                f"{_OPTIONS} {shlex.join(options)} {shlex.quote(argument_of(full))} {place}"
            )
            done = await sandbox.exec(command, _START_SLACK * time_limit_seconds)
            seen, forged = await _read_outcomes(sandbox, request)
            violations += [f"{forged} results without the key"] if forged else []
            missing = TestOutcome.TIMEOUT if done.timed_out else TestOutcome.MISSING
            reported = {test: seen.get(test, missing) for test in own_tests}
            ran = _canary_outcomes(wanted, seen, missing)
            wrong = sum(outcome not in {right, *_UNMEASURED} for right, outcome in ran)
            violations += [f"{wrong} of {len(wanted)} blind canaries wrong"] if wrong else []
            if any(outcome in _UNMEASURED for _, outcome in ran):  # no pass is confirmed
                passed = [test for test in own_tests if reported[test] is TestOutcome.PASSED]
                reported |= dict.fromkeys(passed, TestOutcome.TIMEOUT)
            outcomes |= reported
    return TestReport(
        outcomes=outcomes,
        tampering=", ".join(violations[:20]),
        route="plain",
        seconds=time.perf_counter() - started,
    )


def _draw_canaries(rng: random.Random) -> dict[str, bool]:
    """Random test names, each with whether the test is made to pass."""
    return {f"test_{rng.getrandbits(64):x}": rng.random() < 0.5 for _ in range(_CANARIES)}


def _canary_text(canaries: Mapping[str, bool], rng: random.Random) -> bytes:
    """Source of the canaries: each asserts a sum of random numbers that is right or wrong."""
    lines: list[str] = []
    for name, passes in canaries.items():
        first, second = rng.randrange(10**6), rng.randrange(10**6)
        total = first + second + (0 if passes else rng.randrange(1, 10**6))
        lines += [f"def {name}():", f"    assert sum([{first}, {second}]) == {total}", ""]
    return "\n".join(lines).encode()


async def _read_outcomes(
    sandbox: Sandbox, request: Mapping[str, object]
) -> tuple[dict[str, TestOutcome], int]:
    """Outcome by test id (the first that is not a pass, if any), and the number of results without the key."""
    try:
        answer = await sandbox.read(str(request["answer"]))
    except SandboxNotFound:
        return {}, 0
    seen: dict[str, TestOutcome] = {}
    forged = 0
    for text in answer.splitlines():
        try:
            line = json.loads(text)
            test, outcome = str(line["test"]), TestOutcome(line["outcome"])
            is_mine = line["key"] == request["key"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_mine, test, outcome = False, "", TestOutcome.MISSING
        forged += not is_mine
        if is_mine and seen.get(test, TestOutcome.PASSED) is TestOutcome.PASSED:
            seen[test] = outcome
    return seen, forged


def _canary_outcomes(
    wanted: Mapping[str, bool], seen: Mapping[str, TestOutcome], missing: TestOutcome
) -> list[tuple[TestOutcome, TestOutcome]]:
    """The right and the actual outcome of each canary."""
    by_name = {test.rpartition("::")[2]: outcome for test, outcome in seen.items()}
    right = {True: TestOutcome.PASSED, False: TestOutcome.FAILED}
    return [(right[passes], by_name.get(name, missing)) for name, passes in wanted.items()]
