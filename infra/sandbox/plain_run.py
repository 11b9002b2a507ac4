"""A second opinion on a test run: plain pytest, one process per file, in a box of its own.

It shares neither process, nor import, nor result channel with the warm test server, so a trick on
one does not work on the other. Every process also runs canaries made for it alone: tests with random
names that pass or fail at random. A run that forges outcomes guesses them all with a chance of 1 in
65,536. Slow (an interpreter per test file): for passes that matter, not for feedback.
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
from ostinato.infra.sandbox.inside.sources import make_options
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository

_CANARIES = 16
_FOLDER = "/tmp/second"
_CLOCK = f"{_FOLDER}/later_clock.so"
_SETTINGS = b"[pytest]\nmarkers =\n"
_OPTIONS = (
    f"-p no:cacheprovider -c {_FOLDER}/pytest.ini --rootdir=/repo --confcutdir=/repo "
    "--import-mode=prepend -W ignore --tb=no -q"
)
_REPORTER = Path(__file__).with_name("plain_reporter.py")
_START_SLACK = 6  # an interpreter starts in each process, and waiting for a CPU counts here


async def run_plainly(
    repository: PreparedRepository,
    files: Mapping[str, bytes | None],
    test_ids: Sequence[str],
    time_limit_seconds: float,
    *,
    later: bool = False,
) -> TestReport:
    """Run tests on the pristine repository with the editable ones of `files` laid over it.

    `later`: the clock of the tests is 404 days ahead, in the time zone that is furthest east.
    """
    started = time.perf_counter()
    chance = random.SystemRandom()
    outcomes = dict.fromkeys(test_ids, TestOutcome.MISSING)
    violations: list[str] = []
    limits = SandboxLimits(memory_bytes=2 << 30)
    rules = shlex.join(make_options(REPOSITORY_PATH, repository.collection_rules))
    async with open_box(repository, repository.keep_editable(files), limits) as sandbox:
        for path in dict.fromkeys(test.partition("::")[0] for test in test_ids):
            await sandbox.exec(f"mkdir -p {_FOLDER}", 10.0)
            await sandbox.write(f"{_FOLDER}/pytest.ini", _SETTINGS)
            if later:
                await sandbox.write(_CLOCK, build_later_clock().read_bytes())
            wanted = _draw_canaries(chance)
            canaries, reporter = (f"{kind}_{chance.getrandbits(48):x}" for kind in ("test", "run"))
            place = f"{_FOLDER}/{canaries}.py"
            await sandbox.write(place, _canary_text(wanted, chance))
            mine = [test for test in test_ids if test.partition("::")[0] == path]
            request = {
                "key": f"{chance.getrandbits(128):x}",
                "tests": mine,
                "canaries": f"{canaries}.py",
                "answer": f"{_FOLDER}/{reporter}.answer",
            }
            await sandbox.write(f"{_FOLDER}/{reporter}.py", _REPORTER.read_bytes())
            await sandbox.write(f"{_FOLDER}/{reporter}.json", json.dumps(request).encode())
            clock = f"TZ=EAST-14 LD_PRELOAD={_CLOCK} " if later else ""
            command = (
                f"{clock}PYTHONPATH=$PYTHONPATH:{_FOLDER} python -m pytest -p {reporter} "
                f"{_OPTIONS} {rules} {shlex.quote(path)} {place}"
            )
            done = await sandbox.exec(command, _START_SLACK * time_limit_seconds)
            seen, forged = await _read_outcomes(sandbox, request)
            violations += [f"{forged} results without the key"] if forged else []
            violations += [] if done.timed_out else _check_canaries(wanted, seen)
            missing = TestOutcome.TIMEOUT if done.timed_out else TestOutcome.MISSING
            outcomes |= {test: seen.get(test, missing) for test in mine}
    return TestReport(
        outcomes=outcomes,
        tampering=", ".join(violations[:20]),
        route="plain",
        seconds=time.perf_counter() - started,
    )


def _draw_canaries(chance: random.Random) -> dict[str, bool]:
    """Random test names -> whether the test is made to pass."""
    return {f"test_{chance.getrandbits(64):x}": chance.random() < 0.5 for _ in range(_CANARIES)}


def _canary_text(canaries: Mapping[str, bool], chance: random.Random) -> bytes:
    """Sums of random numbers, right or wrong."""
    lines: list[str] = []
    for name, passes in canaries.items():
        first, second = chance.randrange(10**6), chance.randrange(10**6)
        total = first + second + (0 if passes else chance.randrange(1, 10**6))
        lines += [f"def {name}():", f"    assert sum([{first}, {second}]) == {total}", ""]
    return "\n".join(lines).encode()


async def _read_outcomes(
    sandbox: Sandbox, request: Mapping[str, object]
) -> tuple[dict[str, TestOutcome], int]:
    """Outcome by test id, the worst where there are several, and how many results have not the key."""
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


def _check_canaries(wanted: Mapping[str, bool], seen: Mapping[str, TestOutcome]) -> list[str]:
    by_name = {test.rpartition("::")[2]: outcome for test, outcome in seen.items()}
    wrong = [
        name
        for name, passes in wanted.items()
        if by_name.get(name) is not (TestOutcome.PASSED if passes else TestOutcome.FAILED)
    ]
    return [f"{len(wrong)} of {len(wanted)} blind canaries wrong"] if wrong else []
