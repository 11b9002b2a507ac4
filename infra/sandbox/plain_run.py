"""A second opinion on a test run: plain pytest, one process per file, in a box of its own.

It shares neither process, nor import, nor result channel with the warm test server, so a trick on
one does not work on the other. Every process also runs canaries made for it alone: tests with random
names that pass or fail at random. A run that forges outcomes guesses them all with a chance of 1 in
65,536. Slow (an interpreter per test file): for passes that matter, not for feedback.
"""

import random
import re
import shlex
import time
from collections.abc import Mapping, Sequence

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH
from ostinato.infra.sandbox.host.system import build_later_clock
from ostinato.infra.sandbox.inside.sources import make_options
from ostinato.infra.sandbox.protocol import SandboxLimits, TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository

_CANARIES = 16
_FOLDER = "/tmp/second"
_CLOCK = f"{_FOLDER}/later_clock.so"
_SETTINGS = b"[pytest]\nmarkers =\n"
_OPTIONS = (
    f"-p no:cacheprovider -c {_FOLDER}/pytest.ini --rootdir=/repo --confcutdir=/repo "
    "--import-mode=prepend -W ignore --tb=no -q -rA --color=no"
)
_OUTCOMES = {
    "PASSED": TestOutcome.PASSED,
    "FAILED": TestOutcome.FAILED,
    "ERROR": TestOutcome.ERROR,
    "XFAIL": TestOutcome.SKIPPED,
    "XPASS": TestOutcome.SKIPPED,
    "SKIPPED": TestOutcome.SKIPPED,
}
_OUTPUT_CAP_BYTES = 1 << 20
_START_SLACK = 6  # an interpreter starts in each process, and waiting for a CPU counts here
_LINE = re.compile(rf"^({'|'.join(_OUTCOMES)}) (\S.*?)(?: - .*)?$")


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
            name = f"{_FOLDER}/test_{chance.getrandbits(48):x}.py"
            await sandbox.write(name, _canary_text(wanted, chance))
            mine = [test for test in test_ids if test.partition("::")[0] == path]
            clock = f"TZ=EAST-14 LD_PRELOAD={_CLOCK} " if later else ""
            command = f"{clock}python -m pytest {_OPTIONS} {rules} {' '.join(map(shlex.quote, mine))} {name}"
            result = await sandbox.exec(
                command, _START_SLACK * time_limit_seconds, _OUTPUT_CAP_BYTES
            )
            if result.timed_out:
                outcomes.update(dict.fromkeys(mine, TestOutcome.TIMEOUT))
                continue
            output = result.output.decode(errors="replace")
            seen, doubled = _read_outcomes(output)
            seen |= dict.fromkeys(_failed_in_part(mine, output), TestOutcome.FAILED)
            violations += [f"duplicate result of {test}" for test in doubled]
            violations += _check_canaries(wanted, seen)
            for test in mine:
                outcomes[test] = seen.get(test, TestOutcome.MISSING)
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


def _read_outcomes(output: str) -> tuple[dict[str, TestOutcome], list[str]]:
    """Outcome by test id, and the ids with more than one line. Any bad line wins over a pass."""
    seen: dict[str, TestOutcome] = {}
    doubled: list[str] = []
    for line in output.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        outcome, test = _OUTCOMES[found[1]], found[2]
        if test in seen:
            doubled.append(test)
            outcome = outcome if seen[test] is TestOutcome.PASSED else seen[test]
        seen[test] = outcome
    return seen, doubled


def _failed_in_part(tests: Sequence[str], output: str) -> list[str]:
    """Tests of which a subtest failed: pytest reports a unittest test itself as passed. A subtest's line has
    its parameters before the test's id.
    """
    lines = [f"{line} - " for line in output.splitlines() if line.startswith("SUBFAILED")]
    return [test for test in tests if any(f" {test} - " in line for line in lines)]


def _check_canaries(wanted: Mapping[str, bool], seen: Mapping[str, TestOutcome]) -> list[str]:
    by_name = {test.rpartition("::")[2]: outcome for test, outcome in seen.items()}
    wrong = [
        name
        for name, passes in wanted.items()
        if by_name.get(name) is not (TestOutcome.PASSED if passes else TestOutcome.FAILED)
    ]
    return [f"{len(wrong)} of {len(wanted)} blind canaries wrong"] if wrong else []
