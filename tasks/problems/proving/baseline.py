"""Stable tests of a repository and the functions that they call.

All tests run three times, once shuffled with another hash seed. Tests with an id, an outcome or an existence that
changes between the runs are left out, and so are test files that cannot be imported.
"""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.infra.sandbox.test_server import TestProbe, TestServer
from ostinato.tasks.problems.breaking.definitions import CallKey, Definition
from ostinato.tasks.problems.config import ValidityRules

_ERROR_CHARACTERS = 300
_ROUNDS = 40  # maximum number of runs of a probe; each run ends at the first test that hangs
_CLOCK_SECONDS = 1.1  # long enough for a clock of whole seconds to advance
_LIMITS_PER_PROBE = 40  # time limit of a probe of all tests, in limits of one run


class Baseline(Record):
    """The stable tests of a repository. Arrays are parallel to `tests`."""

    repository: str
    fingerprint: str
    tests: tuple[str, ...]
    # bit lengths of the numbers of calls, because the numbers differ a little from run to run
    call_bits: tuple[int, ...]
    num_collected: int = Field(description="test ids seen in either order")
    num_unstable: int = Field(description="ids or outcomes that changed between the runs")
    num_not_passing: int = Field(description="tests that did not pass the first run")
    callers: dict[str, tuple[int, ...]]
    """function -> positions of the tests that call it"""
    left_out: dict[str, str] = Field(default={})
    """test file that cannot be imported -> reason"""

    def covering(self, keys: Iterable[CallKey]) -> list[int]:
        """Positions of the tests that call any of the functions."""
        found: set[int] = set()
        for key in keys:
            found.update(self.callers.get(_text(key), ()))
        return sorted(found)

    def tests_covering(self, keys: Iterable[CallKey], files: Sequence[str]) -> list[int]:
        """Positions of the tests that call any of the functions or lie in any of the files."""
        wanted = frozenset(files)
        inside = [n for n, test in enumerate(self.tests) if test.partition("::")[0] in wanted]
        return sorted({*self.covering(keys), *inside})

    def cheapest_tests(self, definitions: Iterable[Definition], each: int) -> tuple[str, ...]:
        """For every function, the `each` tests that call it with the fewest function calls in all."""
        found: set[int] = set()
        for definition in definitions:
            calling = self.callers.get(_text(definition.call_key), ())
            found.update(sorted(calling, key=lambda position: self.call_bits[position])[:each])
        return tuple(self.tests[position] for position in sorted(found))


async def measure_baseline(
    server: TestServer, shuffled: TestServer, rules: ValidityRules, seed: int
) -> Baseline:
    """Runs all tests plainly, profiled, and shuffled on the server with the other hash seed."""
    await server.start()
    await asyncio.sleep(_CLOCK_SECONDS)  # so that test ids that contain a time differ
    await shuffled.start()
    left_out = _failed_files(server.collection_errors)
    same_ids = [test for test in server.tests if test in frozenset(shuffled.tests)]
    plain = await _probe(server, same_ids, rules)
    first = _passed(plain)
    profiled = await _probe(server, first, rules, profile=True)
    second = _passed(profiled)
    mixed = list(second)
    random.Random(f"{seed} {server.repository.fingerprint}").shuffle(mixed)
    third = frozenset(_passed(await _probe(shuffled, mixed, rules)))
    stable = [
        test
        for test in second
        if test in third
        and profiled[test].num_calls <= rules.max_test_calls
        and plain[test].idle_seconds <= rules.max_idle_seconds
    ]
    if not stable:
        raise ProblemError(
            f"repository {server.repository.name}: none of {len(server.tests)} tests passes three "
            f"times; first outcome {next(iter(plain.values()), None)}; test files that cannot be "
            f"imported: {left_out}"
        )
    num_collected = len({*server.tests, *shuffled.tests})
    return Baseline(
        repository=server.repository.name,
        fingerprint=server.repository.fingerprint,
        tests=tuple(stable),
        call_bits=tuple(profiled[test].num_calls.bit_length() for test in stable),
        num_collected=num_collected,
        num_unstable=num_collected - len(same_ids) + len(first) - len(set(first) & third),
        num_not_passing=len(same_ids) - len(first),
        callers=_invert(stable, profiled),
        left_out=left_out,
    )


def _failed_files(collection_errors: Sequence[str]) -> dict[str, str]:
    """The end of each file's error, by file. An error begins with the node that failed."""
    split = (error.partition(": ") for error in collection_errors)
    return {node.partition("::")[0]: text[-_ERROR_CHARACTERS:] for node, _, text in split}


def _passed(probes: Mapping[str, TestProbe]) -> list[str]:
    return [test for test, probe in probes.items() if probe.outcome is TestOutcome.PASSED]


def _invert(stable: Sequence[str], probes: Mapping[str, TestProbe]) -> dict[str, tuple[int, ...]]:
    callers: dict[str, list[int]] = {}
    for position, test in enumerate(stable):
        for key in probes[test].called:
            callers.setdefault(_text(key), []).append(position)
    return {key: tuple(positions) for key, positions in sorted(callers.items())}


async def _probe(
    server: TestServer, tests: Sequence[str], rules: ValidityRules, *, profile: bool = False
) -> dict[str, TestProbe]:
    """Outcomes of all tests. The run restarts after every test that hangs or ends the process."""
    found: dict[str, TestProbe] = {}
    waiting = list(tests)
    for _ in range(_ROUNDS):
        if not waiting:
            break
        limit = _LIMITS_PER_PROBE * rules.time_limit_seconds
        seen = await server.probe(waiting, limit, profile=profile)
        found |= seen
        known = [position for position, test in enumerate(waiting) if test in seen]
        # a test that ended the process reported nothing, so it follows the last test that did
        is_cut = not known or seen[waiting[known[-1]]].outcome is not TestOutcome.TIMEOUT
        num_reported = known[-1] + 1 if known else 0
        waiting = waiting[num_reported + (1 if is_cut else 0) :]
    return found


def _text(key: CallKey) -> str:
    return f"{key[0]}:{key[1]}:{key[2]}"
