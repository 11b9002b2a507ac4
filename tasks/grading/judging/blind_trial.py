"""A trial that no imitation of a test runner passes: values are compared here, not in a box.

The change runs the problem's tests without their expectations (blind_tests.py), on their own inputs
and on inputs drawn by chance that nobody knows beforehand: literals of the tests, and arguments
with which they come to call the problem's function. The original ran the same in another box that
never saw a change. What a mutated function itself returns must be of the original's kinds: other
product code may compare it and show only the answer. Only plain data comes out of either box; what
cannot be read counts as a difference.
"""

import asyncio
import functools
import logging
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CALL_ROOT, run_call_program
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_helpers import find_helpers, find_own_assertions
from ostinato.tasks.grading.judging.blind_tests import (
    find_inherited,
    judges_comparisons,
    take_expectations_out,
)
from ostinato.tasks.records import Problem

logger = logging.getLogger(__name__)
LIMITS = SandboxLimits(memory_bytes=2 << 30)
_VARIED_SHARES = (0.0, 0.5, 1.0)  # of what tests hand on, by copy with changed literals
_CHANGED_COPIES = len(_VARIED_SHARES)
_PERTURBED_SHARES = (1.0, 0.5)  # of the calls, by copy
_DRAWS = 2  # at most, until other arguments tell the broken state from the original
_MOST_FAILING, _MOST_PASSING = 10, 4  # test functions of a trial
_MOST_INSTANCES = 12  # of one parametrized test
_TEST_SECONDS = 0.5
_SLACK = 3.0  # a change may be slower than the original
_SECONDS = 60.0
_KEPT_TRIALS = 256
_BOXES_AT_A_TIME = 4  # more only wait for one another's processor time
_TOLERANCE = 1e-9
_TOO_LONG: dict[str, object] = {"ended": "CallTimeout"}

_NOT_JUDGED = (
    "no blind trial tells this problem's broken state from the original, so no pass is believed"
)

_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)

Values = dict[str, list[object]]  # by test, in the order of their appearance


@dataclass(frozen=True)
class Trial:
    """Tests without expectations, and what the original shows in them."""

    drawn: "DrawnTests"
    wanted: Mapping[str, Sequence[object]]
    separates: bool  # whether the broken state shows anything else


@dataclass(frozen=True)
class DrawnTests:
    """Test files under names that say nothing, and what of them is run."""

    files: Mapping[str, bytes]
    tests: tuple[str, ...]
    instances: tuple[str, ...]  # of parametrized tests, always run
    order: int
    perturbed: Mapping[str, float]  # share of calls with other arguments than tests give, by file
    varied: Mapping[str, float]  # share of what tests and their helpers hand on, by file
    function: tuple[str, str] | None = None  # path and symbol, whose kinds of results are noted
    chosen: tuple[str, ...] = ()  # what the first run has shown, which the others run again

    def has_unseen(self, tests: Iterable[str]) -> bool:
        """Whether one of the tests is of a copy in which every call with plain arguments gets other ones."""
        return any(self.perturbed.get(test.partition("::")[0]) == 1.0 for test in tests)


class BlindTrials:
    """Trials of one process, made when a problem is first passed. No two processes draw the same."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.SystemRandom()
        self._boxes = asyncio.Semaphore(_BOXES_AT_A_TIME)
        self._trials: OrderedDict[str, asyncio.Task[Trial]] = OrderedDict()
        self._differences: OrderedDict[tuple[str, tuple[tuple[str, bytes | None], ...]], str] = (
            OrderedDict()
        )

    async def find_difference(
        self,
        problem: Problem,
        changed_files: Mapping[str, bytes | None],
        repository: PreparedRepository,
    ) -> str:
        """First difference between a change and the original. Empty: they agree everywhere."""
        changed = repository.keep_editable(changed_files)
        if not changed:
            return ""  # it is the original
        key = (problem.problem_id, tuple(changed.items()))
        if key not in self._differences:
            async with self._boxes:
                trial = await self._trial_of(problem, repository)
                self._differences[key] = await compare(trial, repository, changed)
            if len(self._differences) > _KEPT_TRIALS:
                self._differences.popitem(last=False)
        return self._differences[key]

    async def _trial_of(self, problem: Problem, repository: PreparedRepository) -> Trial:
        made = self._trials.get(problem.problem_id)
        if made is None or (made.done() and (made.cancelled() or made.exception())):
            made = asyncio.create_task(prepare_trial(problem, repository, self._chance))
            self._trials[problem.problem_id] = made
            if len(self._trials) > _KEPT_TRIALS:
                self._trials.popitem(last=False)
        return await asyncio.shield(made)


async def prepare_trial(
    problem: Problem, repository: PreparedRepository, chance: random.Random
) -> Trial:
    """A trial of one problem with inputs drawn now. The original alone is in its box.

    The broken state is tried too, in another: a trial that it passes would prove nothing.
    """
    broken = repository.keep_editable(problem.break_files(repository.files))
    weak: Trial | None = None
    for _ in range(_DRAWS):
        drawn = await asyncio.to_thread(draw_tests, problem, repository, chance)
        trial = await _observe_original(repository, drawn)
        try:
            different = await _find_different(trial, repository, broken)
        except _UNREADABLE:
            different = list(trial.wanted)
        # an answer to the tests' own inputs alone does not pass it
        if different and (drawn.function is None or drawn.has_unseen(different)):
            return trial
        weak = trial if different else weak
    if weak is not None:
        return weak
    logger.warning("problem=%s %s", problem.problem_id, _NOT_JUDGED)
    return replace(trial, separates=False)


async def _observe_original(repository: PreparedRepository, drawn: DrawnTests) -> Trial:
    async with open_box(repository, drawn.files, LIMITS) as sandbox:
        first = await observe(sandbox, drawn, hash_seed=0)
        ended = tuple(test for test, values in first.items() if has_ended(values))
        drawn = replace(drawn, chosen=ended or tuple(first))
        # other hashes, other luck, and what changes will run after: what they decide differs
        second = await observe(sandbox, drawn, hash_seed=1)
    wanted = {test: keep_stable(values, second.get(test, [])) for test, values in first.items()}
    return Trial(drawn, wanted, separates=True)


def has_ended(values: Sequence[object]) -> bool:
    """Whether a test came to its end: neither its own time was over nor that of all."""
    return _TOO_LONG not in values and any(
        isinstance(value, dict) and "ended" in value for value in values
    )


def keep_stable(first: Sequence[object], second: Sequence[object]) -> list[object]:
    """Values on which two runs of a test agree, None for the others. Where objects of some type differ, no
    object of that type is kept: times of a clock may agree by chance. What follows an exception that
    ends the test is left out.
    """
    pairs = list(zip(first, second, strict=False))
    volatile = {name for one, two in pairs if one != two for name in _types_in(one)}
    kept: list[object] = []
    for one, two in pairs:
        if isinstance(one, dict) and one.get("ended"):
            return [] if one == _TOO_LONG else kept
        kept.append(one if one == two and volatile.isdisjoint(_types_in(one)) else None)
    return kept


def _types_in(form: object) -> Iterator[str]:
    """Names of the types of those values in a form that are no plain data."""
    if isinstance(form, dict):
        if form.keys() == {"type", "text"}:
            yield form["type"]
        form = list(form.values())
    if isinstance(form, list):
        for item in form:
            yield from _types_in(item)


async def compare(
    trial: Trial, repository: PreparedRepository, changed: Mapping[str, bytes | None]
) -> str:
    """First difference between a change and the original in a trial. Empty: none."""
    if not trial.separates:
        return _NOT_JUDGED
    try:
        different = await _find_different(trial, repository, changed)
    except _UNREADABLE as error:
        return f"blind trial: what the change shows cannot be read ({type(error).__name__})"
    if not different:
        return ""
    return f"differs from the original in {len(different)} of {len(trial.wanted)} blind tests"


async def _find_different(
    trial: Trial, repository: PreparedRepository, changed: Mapping[str, bytes | None]
) -> list[str]:
    """Tests in which a change does not show all that the original shows."""
    async with open_box(repository, {**changed, **trial.drawn.files}, LIMITS) as sandbox:
        seen = await observe(sandbox, trial.drawn, hash_seed=0, wanted=trial.wanted)
    return [test for test, wanted in trial.wanted.items() if not agrees(seen.get(test, []), wanted)]


def agrees(seen: Sequence[object], wanted: Sequence[object]) -> bool:
    """Whether a change shows everything that the original shows. None: anything."""
    if len(seen) < len(wanted):
        return False
    pairs = zip(seen, wanted, strict=False)
    return all(two is None or is_same(one, two) for one, two in pairs)


def is_same(one: object, two: object) -> bool:
    """Equality of two forms: exact types, floats within a relative or absolute 1e-9."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return False
        if one.keys() == {"float"}:
            return _is_close(one["float"], two["float"])
        return all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(is_same, one, two))
    return one == two


def _is_close(one: object, two: object) -> bool:
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    if one == two:
        return True
    try:
        first, second = float.fromhex(one), float.fromhex(two)
    except (ValueError, OverflowError):
        return False
    return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def draw_tests(
    problem: Problem, repository: PreparedRepository, chance: random.Random
) -> DrawnTests:
    """Tests of a trial: each as it is and in copies with other literals, all without expectations."""
    names = [*_draw(problem.fail_to_pass, _MOST_FAILING, chance)]
    names += _draw(problem.pass_to_pass, _MOST_PASSING, chance)
    by_path: dict[str, set[str]] = defaultdict(set)
    for name in names:
        path, _, test = name.partition("::")
        by_path[path].add(test.replace("::", "."))
    helpers = find_helpers(repository, by_path)
    blind = functools.partial(
        take_expectations_out,
        with_literals=judges_comparisons(problem.symbol),
        own_assertions=find_own_assertions(repository, [*by_path, *helpers]),
        rules=repository.collection_rules,
    )
    files: dict[str, bytes] = {}
    for path in helpers:
        with suppress(SyntaxError, ValueError, RecursionError):  # data with the name of a module
            files[path] = blind(repository.files[path], None)
    # these files stay, without tests, for others that import from them: no hidden test is in the
    # box as it is written
    for path in {*by_path, *(block.path for block in problem.cut_tests)}:
        files[path] = blind(repository.files[path], frozenset())
    files |= _blind_bases(repository, by_path, blind)
    tests: list[str] = []
    instances: list[str] = []
    perturbed: dict[str, float] = {}
    varied: dict[str, float] = {}
    # who writes a deleted function anew may write it otherwise, as an alias or a class
    is_rewritten = bool(problem.blocks) or not problem.symbol
    function = None if is_rewritten else (problem.path, problem.symbol)
    for path, chosen in sorted(by_path.items()):
        # a class of the same file may bring them to the class that is named
        kept_tests = frozenset(chosen) | find_inherited(repository.files[path], frozenset(chosen))
        folder = path.rpartition("/")[0]
        shares = (0.0,) * (1 + _CHANGED_COPIES) + (_PERTURBED_SHARES if function else ())
        for copy, share in enumerate(shares):
            drawn = chance if copy and not share else None
            name = f"test_{chance.getrandbits(48):012x}.py"
            place = f"{folder}/{name}" if folder else name
            files[place] = blind(repository.files[path], kept_tests, drawn)
            if share:
                perturbed[place] = share
            elif copy:
                varied[place] = _VARIED_SHARES[copy - 1]
            tests += [f"{place}::{test.replace('.', '::')}" for test in sorted(chosen)]
            if copy == 0:
                mine = [test for test in problem.fail_to_pass if test.startswith(f"{path}::")]
                kept = chance.sample(mine, min(len(mine), _MOST_INSTANCES))
                instances += [place + test.removeprefix(path) for test in kept]
    return DrawnTests(
        files,
        tuple(tests),
        tuple(instances),
        chance.getrandbits(48),
        perturbed,
        varied,
        function,
    )


def _blind_bases(
    repository: PreparedRepository, by_path: Mapping[str, set[str]], blind: Callable[..., bytes]
) -> dict[str, bytes]:
    """Test files that hold chosen tests which others inherit, those tests alone."""
    wanted = frozenset(
        name
        for path, chosen in by_path.items()
        for name in find_inherited(repository.files[path], frozenset(chosen))
    )
    marks = [f"def {name}(".encode() for name in wanted]
    return {
        path: blind(content, wanted)
        for path, content in repository.files.items()
        if path.endswith(".py") and repository.is_test(path) and any(m in content for m in marks)
    }


def _draw(tests: Sequence[str], most: int, chance: random.Random) -> list[str]:
    functions = list(dict.fromkeys(test.partition("[")[0] for test in tests))
    return chance.sample(functions, min(most, len(functions)))


async def observe(
    sandbox: Sandbox,
    drawn: DrawnTests,
    *,
    hash_seed: int,
    wanted: Mapping[str, Sequence[object]] | None = None,
) -> Values:
    """What the tests show. `wanted`: what they show in the original; None: this is the original.
    Where a change takes too long in a test that shows something in the original, the rest of the
    file does not run: the difference is found already.
    """
    slack = 1.0 if wanted is None else _SLACK
    request = {
        "root": CALL_ROOT,
        "files": sorted({test.partition("::")[0] for test in drawn.tests}),
        "tests": drawn.tests,
        "instances": drawn.instances,
        "chosen": drawn.chosen,
        "order": drawn.order,
        "luck": drawn.order + hash_seed,  # of the module random
        "most": _MOST_INSTANCES,
        "test_seconds": slack * _TEST_SECONDS,
        "timely": [test for test, values in (wanted or {}).items() if values],
        "function": drawn.function,
        "perturbed": drawn.perturbed,
        "varied": drawn.varied,
    }
    lines, _ = await run_call_program(sandbox, "observe", request, slack * _SECONDS, hash_seed)
    values: Values = defaultdict(list)
    for line in lines:
        test = line.pop("test")
        if not isinstance(test, str) or len(line) != 1:
            raise ValueError("a line that is no observation")
        values[test].append(line)
    return dict(values)
