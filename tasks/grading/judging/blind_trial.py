"""The blind trial: values are compared outside the box, so that no imitation of a test runner passes.

The change runs the problem's tests without their expectations (blind_tests.py), on the tests' own inputs
and on random inputs that are unknown before the trial: changed literals of the tests, and changed
arguments of the calls that the tests make of the problem's function. The original runs the same tests in
another box that never holds a change. A mutated function must return values of the same types as the
original, because other product code may compare them and show only the answer. Only plain data comes out
of either box. Output that cannot be read counts as a difference.
"""

import asyncio
import functools
import logging
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import run_call_program
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.config import Harm
from ostinato.tasks.grading.judging.drawn_calls import (
    Differences,
    DrawnCalls,
    add_time,
    compare_calls,
    compare_repeats,
    count_repeats,
    draw_original_calls,
    find_stable_repeats,
    is_same,
)
from ostinato.tasks.grading.judging.drawn_tests import MAX_INSTANCES, DrawnTests, draw_tests
from ostinato.tasks.grading.judging.other_code import OtherCode, name_some
from ostinato.tasks.records import Problem

logger = logging.getLogger(__name__)
LIMITS = SandboxLimits(memory_bytes=2 << 30)
_DRAWS = 2  # trials drawn, at most, until changed arguments tell the broken state from the original
_TEST_SECONDS = 0.5
_SLACK = 3.0  # a change may be slower than the original
_SECONDS = 60.0
_LONGER = 5.0  # factor on the time limit when the original's tests did not end
_KEPT_TRIALS = 256
_BOXES_AT_A_TIME = 4  # more boxes only wait for processor time
_WHOLE: dict[str, object] = {"ended": ""}
_TOO_LONG: dict[str, object] = {"ended": "CallTimeout"}

_NOT_JUDGED = (
    "no blind trial tells this problem's broken state from the original, so no pass is believed"
)

_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)

_CallsKey = tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]  # problem, OtherCode.modules
_Key = TypeVar("_Key")
_Made = TypeVar("_Made")
# prefixes of facts
_RETURNS = "returns "
_CHANGES, _CHANGES_ARGUMENT = "changes ", "changes argument"


@dataclass
class Shown:
    """Values and facts that one run of the tests without expectations shows."""

    values: dict[str, list[object]] = field(default_factory=lambda: defaultdict(list))
    """values by test, in the order of their appearance"""
    facts: dict[str, frozenset[str]] = field(default_factory=dict)
    """effects of the function's calls other than their values, by test: a set, without order or count"""
    places: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0  # median time of a call of the function
    calls: tuple[str, ...] = ()  # arguments of some of its calls
    copied: tuple[str, ...] = ()  # places of the calls that were copied
    is_complete: bool = False  # whether all chosen tests ran within the time limit
    repeated: dict[str, Any] | None = (
        None  # result of the call that is repeated many times at the end
    )
    has_repeated: bool = False  # whether the process lived until the repeated call had ended


@dataclass(frozen=True)
class Trial:
    """Tests without expectations, and what the original shows in them."""

    drawn: DrawnTests
    wanted: Mapping[str, Sequence[object]]
    facts: Mapping[str, frozenset[str]]
    """facts by test, for tests that end without an exception; facts of imports under the empty name"""
    surroundings: frozenset[str]  # changes of the surroundings in any test
    seconds: float
    calls: tuple[str, ...]
    limit_seconds: float = _SECONDS  # time limit of all tests of the original
    is_complete: bool = True  # whether all of them ran within the limit
    separates: bool = True  # whether the trial tells the broken state from the original
    repeated: Mapping[str, Any] | None = None  # result of one call of the tests, made many times
    copied: tuple[str, ...] = ()  # places of the calls that every run copies
    shifted: "Trial | None" = None
    """trial under another clock, which is compared as well if this one keeps the real clock"""

    worn: "Trial | None" = None
    """the same tests after the function's first call was made many times, where no copy of a call shows what that does"""

    @property
    def shows_wear(self) -> bool:
        """Whether a call is compared with itself after many calls."""
        return bool(self.calls) or (self.repeated or {}).get("stays", False)

    @property
    def drawn_for_calls(self) -> DrawnTests:
        """The drawn tests with the clock of the drawn calls, which need no file times and never the real clock."""
        shift_seconds = (self.shifted or self).drawn.shift_seconds
        return replace(self.drawn, shift_seconds=shift_seconds)


class BlindTrials:
    """Trials of one process, each made when a problem is first passed. Every process draws its own."""

    def __init__(self, rng: random.Random | None = None, *, draws_calls: bool = True) -> None:
        """`draws_calls`: whether a change that passes the blind tests is compared on drawn calls as well."""
        self._rng = rng or random.SystemRandom()
        self._draws_calls = draws_calls
        self._boxes = asyncio.Semaphore(_BOXES_AT_A_TIME)
        self._trials: OrderedDict[str, asyncio.Task[Trial]] = OrderedDict()
        self._calls: OrderedDict[_CallsKey, asyncio.Task[DrawnCalls]] = OrderedDict()
        self._found: OrderedDict[tuple[str, tuple[tuple[str, bytes | None], ...]], Differences] = (
            OrderedDict()
        )

    async def judge(
        self,
        problem: Problem,
        changed_files: Mapping[str, bytes | None],
        repository: PreparedRepository,
    ) -> Differences:
        """Difference of values between the change and the original, and the harms of the change."""
        changed = repository.keep_editable(changed_files)
        if not changed:
            return Differences()  # it is the original
        key = (problem.problem_id, tuple(changed.items()))
        if key not in self._found:
            async with self._boxes:
                self._found[key] = await self._judge(problem, changed, repository)
            _drop_oldest(self._found)
        return self._found[key]

    async def _judge(
        self, problem: Problem, changed: dict[str, bytes | None], repository: PreparedRepository
    ) -> Differences:
        other = OtherCode.of(problem, repository, changed)
        trial = await _shared(
            self._trials,
            problem.problem_id,
            lambda: _prepare_worn(problem, repository, self._rng),
        )
        if not trial.separates:
            return Differences(_NOT_JUDGED)
        try:
            shifted = Differences()
            if trial.shifted is not None:
                files = {**changed, **trial.shifted.drawn.files}
                async with open_box(repository, files, LIMITS) as sandbox:
                    shifted = await compare(trial.shifted, sandbox)
            if shifted.difference:
                return shifted
            async with open_box(repository, {**changed, **trial.drawn.files}, LIMITS) as sandbox:
                found = await compare(trial, sandbox)
                found.harms |= shifted.harms
                if trial.worn is not None and not found.difference:
                    found.difference = (await compare(trial.worn, sandbox)).difference
                if found.difference or not self._draws_calls:
                    return found
                made = await _shared(
                    self._calls,
                    (problem.problem_id, other.modules),
                    lambda: prepare_calls(repository, trial, other),
                )
                await compare_calls(sandbox, trial.drawn_for_calls, made, found)
        except _UNREADABLE as error:
            detail = f"blind trial: what the change shows cannot be read ({type(error).__name__})"
            return Differences(detail)
        if other.emptied:
            found.harms[Harm.OTHER_CODE] = f"{name_some(other.emptied)} do nothing any more"
        return found


def _drop_oldest(held: OrderedDict[Any, Any]) -> None:
    if len(held) > _KEPT_TRIALS:
        held.popitem(last=False)


async def _shared(
    held: "OrderedDict[_Key, asyncio.Task[_Made]]",
    key: _Key,
    make: Callable[[], Coroutine[Any, Any, _Made]],
) -> _Made:
    """The result of `make` for a key. It runs once per key, and again only if it failed."""
    made = held.get(key)
    if made is None or (made.done() and (made.cancelled() or made.exception())):
        made = held[key] = asyncio.create_task(make())
        _drop_oldest(held)
    return await asyncio.shield(made)


async def prepare_calls(
    repository: PreparedRepository, trial: Trial, other: OtherCode
) -> DrawnCalls:
    """Drawn calls for changes that touch the same other code. Both boxes hold the original alone."""
    drawn = trial.drawn_for_calls
    known = trial.calls if drawn.function else ()
    start = functools.partial(open_box, repository, drawn.files, LIMITS)
    async with start() as sandbox, start() as second:
        return await draw_original_calls((sandbox, second), drawn, known, other.modules)


async def _prepare_worn(
    problem: Problem, repository: PreparedRepository, rng: random.Random
) -> Trial:
    """A trial, with what its tests show after many calls if no repeated call shows that."""
    trial = await prepare_trial(problem, repository, rng)
    if trial.shows_wear or not trial.separates or trial.drawn.function is None:
        return trial
    worn = replace(trial.drawn, is_worn=True, chosen=(), places=())
    return replace(trial, worn=await _observe_original(repository, worn))


async def prepare_trial(
    problem: Problem, repository: PreparedRepository, rng: random.Random
) -> Trial:
    """A trial of one problem with newly drawn inputs. The original runs alone in its box.

    The broken state runs in another box, because a trial that the broken state passes proves nothing.
    """
    broken = repository.keep_editable(problem.break_files(repository.files))
    weak = shifted = None
    for number in range(_DRAWS):
        # The second draw keeps the real clock, because a test that compares file times with it needs that. It is judged
        # beside the first, since a change may be right only until a date.
        drawn = await asyncio.to_thread(
            draw_tests, problem, repository, rng, is_shifted=number == 0
        )
        trial = replace(await _observe_original(repository, drawn), shifted=shifted)
        try:
            async with open_box(repository, {**broken, **drawn.files}, LIMITS) as sandbox:
                seen = await _observe_change(sandbox, trial)
            different = find_different(trial, seen)
        except _UNREADABLE:
            different = list(trial.wanted)
        # a change that only answers the tests' own inputs must not pass
        if different and (drawn.is_rewritten or drawn.has_unseen(different)):
            return trial
        weak, shifted = trial if different else weak, shifted or trial
    if weak is not None:
        return weak
    logger.warning("problem=%s %s", problem.problem_id, _NOT_JUDGED)
    return replace(trial, separates=False)


async def _observe_original(repository: PreparedRepository, drawn: DrawnTests) -> Trial:
    limit_seconds = _SECONDS
    async with open_box(repository, drawn.files, LIMITS) as sandbox:
        first = await observe(sandbox, drawn)
        if not first.is_complete:  # the machine is busy; a trial of fewer tests would prove less
            limit_seconds *= _LONGER
            first = await observe(sandbox, drawn, limit_seconds=limit_seconds)
    ended = tuple(test for test, values in first.values.items() if has_ended(values))
    drawn = replace(drawn, chosen=ended or tuple(first.values), places=first.places)
    # other hash seed, random state, box and preceding tests: values that depend on them differ
    async with open_box(repository, drawn.files, LIMITS) as sandbox:
        second = await observe(
            sandbox,
            drawn,
            is_second=True,
            limit_seconds=limit_seconds,
            repeated=first.repeated["key"] if first.repeated else "",
            copied=first.copied,
        )
    return Trial(
        drawn,
        {test: keep_stable(its, second.values.get(test, [])) for test, its in first.values.items()},
        {
            test: facts | second.facts.get(test, frozenset())
            for test, facts in first.facts.items()
            if not test or all(_WHOLE in shown.values.get(test, []) for shown in (first, second))
        },
        _of_surroundings(first) | _of_surroundings(second),
        max(first.seconds, second.seconds),
        first.calls,
        limit_seconds,
        first.is_complete and second.is_complete,
        repeated=find_stable_repeats(first.repeated, second.repeated),
        copied=first.copied,
    )


def _of_surroundings(shown: Shown) -> frozenset[str]:
    """Changes of the surroundings in all tests. A lasting change, such as a set variable, is seen only in
    the first test that makes it, and that test may end in an exception.
    """
    changes = (
        fact for facts in shown.facts.values() for fact in facts if fact.startswith(_CHANGES)
    )
    return frozenset(fact for fact in changes if not fact.startswith(_CHANGES_ARGUMENT))


def has_ended(values: Sequence[object]) -> bool:
    """Whether a test ended within its own time limit and that of all tests."""
    return _TOO_LONG not in values and any(
        isinstance(value, dict) and "ended" in value for value in values
    )


def keep_stable(first: Sequence[object], second: Sequence[object]) -> list[object]:
    """Values on which two runs of a test agree, None for the others. If two objects of a type differ, no
    object of that type is kept, because clock times, for one, may agree by chance. Values after an
    exception that ends the test are left out.
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
    """Type names of the values in a form that are not plain data."""
    if isinstance(form, dict):
        if form.keys() == {"type", "text"}:
            yield form["type"]
        form = list(form.values())
    if isinstance(form, list):
        for item in form:
            yield from _types_in(item)


async def compare(trial: Trial, sandbox: Sandbox) -> Differences:
    """Differences between the change in a box and the original in the tests of a trial."""
    seen = await _observe_change(sandbox, trial)
    different = find_different(trial, seen)
    if different:
        detail = f"differs from the original in {len(different)} of {len(trial.wanted)} blind tests"
        return Differences(detail)
    if trial.is_complete and not seen.is_complete:
        return Differences("the process ended before all blind tests had run")
    found, symbol = Differences(), (trial.drawn.function or ("", ""))[1]
    for test, facts in trial.facts.items():
        found.add_facts(seen.facts.get(test, frozenset()) - facts, symbol)
    found.add_facts(_of_surroundings(seen) - trial.surroundings, symbol)
    if trial.drawn.is_rewritten:
        found.harms.pop(Harm.EXCEPTION_TEXT, None)
    if symbol:
        add_time(found, symbol, seen.seconds, trial.seconds)
    if trial.repeated and seen.repeated:
        compare_repeats(seen.repeated, dict(trial.repeated), found, symbol)
    elif trial.repeated and not seen.has_repeated:
        found.difference = "the process ended before a call had been repeated"
    return found


def find_different(trial: Trial, seen: Shown) -> list[str]:
    """Tests in which a change does not show everything that the original shows."""
    different = [
        test
        for test, wanted in trial.wanted.items()
        if not agrees(seen.values.get(test, []), wanted)
    ]
    if trial.drawn.is_rewritten:
        return different
    return different + [
        test
        for test, facts in trial.facts.items()
        if test not in different and not _returns_alike(seen.facts.get(test, frozenset()), facts)
    ]


def _returns_alike(seen: frozenset[str], wanted: frozenset[str]) -> bool:
    """Whether a function returned only kinds of values that the original returned, and any if it did."""
    kinds, known = (
        {fact for fact in facts if fact.startswith(_RETURNS)} for facts in (seen, wanted)
    )
    return kinds <= known and bool(kinds) == bool(known)


def agrees(seen: Sequence[object], wanted: Sequence[object]) -> bool:
    """Whether a change shows everything that the original shows. A wanted None matches any value."""
    if len(seen) < len(wanted):
        return False
    pairs = zip(seen, wanted, strict=False)
    return all(two is None or is_same(one, two) for one, two in pairs)


async def _observe_change(sandbox: Sandbox, trial: Trial) -> Shown:
    limit_seconds = _SLACK * trial.limit_seconds
    return await observe(
        sandbox,
        trial.drawn,
        wanted=trial.wanted,
        limit_seconds=limit_seconds,
        repeated=trial.repeated["key"] if trial.repeated else "",
        copied=trial.copied,
    )


async def observe(
    sandbox: Sandbox,
    drawn: DrawnTests,
    *,
    is_second: bool = False,
    wanted: Mapping[str, Sequence[object]] | None = None,
    limit_seconds: float | None = None,
    repeated: str | None = None,
    copied: tuple[str, ...] = (),
) -> Shown:
    """Values and facts that the tests show. `wanted`: those of the original; None: this run is the original's.
    `repeated`: key of the call that is made many times at the end; None: the first call that can be
    repeated; empty: none. `copied`: calls that an earlier run copied. When a change takes too long in a
    test that shows something in the original, the rest of the file does not run, since that is a difference.
    """
    slack = 1.0 if wanted is None else _SLACK
    hash_seed = drawn.hash_seeds[is_second]
    request = {
        "root": drawn.root,
        "files": sorted({test.partition("::")[0] for test in drawn.tests}),
        "tests": drawn.tests,
        "instances": drawn.instances,
        "chosen": drawn.chosen,
        "order": drawn.order,
        "luck": drawn.order + hash_seed,  # seed of the module random
        "most": MAX_INSTANCES,
        "test_seconds": slack * _TEST_SECONDS,
        "timely": [test for test, values in (wanted or {}).items() if values],
        "function": drawn.function,
        "places": drawn.places,
        "perturbed": drawn.perturbed,
        "varied": drawn.varied,
        "repeated": repeated,
        "copied": copied,
        "repeats": count_repeats(drawn),
        "worn": count_repeats(drawn) if drawn.is_worn else 0,
    }
    lines, _ = await run_call_program(
        sandbox,
        "observe",
        request,
        limit_seconds or _SECONDS,
        hash_seed=hash_seed,
        shift_seconds=drawn.shift_seconds,
    )
    shown = Shown()
    for line in lines:
        _read_line(line, shown)
    return shown


def _read_line(line: dict[str, object], shown: Shown) -> None:
    match line:
        case {"places": [*places], **rest} if not rest:
            shown.places = tuple((str(module), str(name)) for module, name in places)
        case {
            "seconds": float() | int() as seconds,
            "calls": [*calls],
            "copied": [*copied],
            **rest,
        } if not rest:
            shown.seconds, shown.calls = float(seconds), tuple(map(str, calls))
            shown.copied = tuple(map(str, copied))
            shown.is_complete = True
        case {"repeated": None | dict() as repeated, **rest} if not rest:
            shown.repeated, shown.has_repeated = repeated, True
        case {"test": str() as test, "facts": [*facts], **rest} if not rest:
            shown.facts[test] = frozenset(map(str, facts))
        case {"test": str() as test, **rest} if len(rest) == 1:
            shown.values[test].append(rest)
        case _:
            raise ValueError("a line that is no observation")
