"""A change that answers the inputs of the tests alone is refused: the trial gives its function others."""

import asyncio
import random
import re
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.sandbox.inside.trials.perturbation import vary_value
from ostinato.infra.sandbox.inside.trials.watched_calls import WatchedCalls
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from tests.fakes.one_line_problem import make_one_line_problem
from tests.fakes.trials import find_difference

LINE = "    return days - 1 if month == 2 and not is_leap else days"
RIGHT = "    return days if month != 2 or is_leap else days - 1"
FUNCTION = f"""DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SAMPLES = ((2001, 2, 28), (2001, 3, 31), (2004, 2, 29))


def days_in(year, month):
    days = DAYS[month - 1]
    is_leap = year % 4 == 0
{LINE}
"""
METHOD = """DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SAMPLES = ((2001, 2, 28), (2001, 3, 31), (2004, 2, 29))


class Calendar:
    def days_in(self, year, month):
        days = DAYS[month - 1]
        is_leap = year % 4 == 0
    LINE


def days_in(year, month):
    return Calendar().days_in(year, month)
""".replace("    LINE", f"    {LINE}")
# inputs that no copy of the test changes
TESTS = """from pkg.code import SAMPLES, days_in


def test_days():
    for year, month, days in SAMPLES:
        assert days_in(year, month) == days
"""
# right where the tests look, as broken everywhere else
SPECIAL = """

_broken = days_in


def days_in(year, month):
    known = {(2001, 2): 28, (2001, 3): 31, (2004, 2): 29}
    return known[year, month] if (year, month) in known else _broken(year, month)
"""
SPECIAL_METHOD = """

_broken = Calendar.days_in


def days_in_calendar(self, year, month):
    known = {(2001, 2): 28, (2001, 3): 31, (2004, 2): 29}
    return known[year, month] if (year, month) in known else _broken(self, year, month)


days_in_calendar.__code__ = days_in_calendar.__code__.replace(co_qualname="Calendar.days_in")
Calendar.days_in = days_in_calendar
"""


@pytest.mark.parametrize(
    ("source", "symbol", "special"),
    [(FUNCTION, "days_in", SPECIAL), (METHOD, "Calendar.days_in", SPECIAL_METHOD)],
    ids=["function", "method"],
)
def test_a_change_that_knows_the_inputs_of_the_tests_alone_is_refused(
    runner: asyncio.Runner, tmp_path: Path, source: str, symbol: str, special: str
) -> None:
    line = next(line for line in source.split("\n") if line.endswith(LINE.strip()))
    edit = (line, line.replace("== 2", "!= 2"))
    repository, problem = make_one_line_problem(
        tmp_path, source, TESTS, edit, symbol=symbol, failing="test_days"
    )
    trials, path = BlindTrials(random.Random(1)), problem.path
    broken = problem.break_files(repository.files)[path] or b""
    cheat = {path: broken + special.encode()}
    assert "blind tests" in runner.run(find_difference(trials, problem, cheat, repository))
    whole = repository.files[path].decode()
    right = {path: whole.replace(LINE.strip(), RIGHT.strip()).encode()}
    assert right[path] != repository.files[path]
    assert not runner.run(find_difference(trials, problem, right, repository))


MOMENTS = st.datetimes(timezones=st.just(UTC)) | st.dates() | st.times() | st.timedeltas()
NUMBERS = st.integers(-99, 99) | st.floats(-9, 9) | st.complex_numbers() | st.decimals()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.fractions()
    | st.text(max_size=5)
    | MOMENTS
    | st.binary(max_size=5)
    | st.sets(st.text(max_size=3), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(VALUES, st.integers(0, 99))
def test_varied_values_keep_their_type_and_the_same_chance_gives_the_same(
    value: Any, seed: int
) -> None:
    varied = vary_value(value, random.Random(seed))
    assert type(varied) is type(value)
    assert repr(varied) == repr(vary_value(value, random.Random(seed)))


KNOWN = (
    datetime(2012, 12, 25, 13, 30, tzinfo=UTC), datetime.max, date(2012, 10, 12), date.min,
    time(8, 29), timedelta(days=3), Decimal("1.5"), Fraction(1, 3), 2j, b"text", {"a"}, frozenset({3}),
    [None, datetime(2012, 12, 25)], re.match("[a-z]+", "word"),
)  # fmt: skip


@pytest.mark.parametrize("value", KNOWN, ids=repr)
def test_values_that_are_told_apart_in_tables_become_others(value: Any) -> None:
    found = [vary_value(value, random.Random(seed)) for seed in range(20)]
    assert {type(other) for other in found} == {type(value)}
    assert sum(repr(other) != repr(value) for other in found) > 4


def test_a_match_becomes_another_match_of_its_pattern() -> None:
    match = re.compile(r"(\d+)-(\d+)").search("of 12-34")
    assert match is not None
    found = [vary_value(match, random.Random(seed)) for seed in range(20)]
    assert all(other.re is match.re and len(other.groups()) == 2 for other in found)
    assert len({other.groups() for other in found}) > 2


def test_one_plain_argument_among_others_is_the_one_that_changes(module: ModuleType) -> None:
    perturbation = watch("/repo/perturbed_module.py", "Box.grow")
    box = module.Box()
    for number in range(20):
        perturbation.begin(f"{number}", 1.0)
        assert box.grow(box, other=7)[2] != 7
        assert box.grow([box, 7], other=None)[1] != [box, 7]
    perturbation.begin("", 0.0)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    source = """
class Box:
    size = 3

    def grow(self, by, other=None):
        return self, by, other

    @staticmethod
    def made(count):
        return count

    @classmethod
    def named(cls, count):
        return cls, count

    @property
    def weight(self):
        return 5


def down(number):
    return [number, *down(number - 1)] if number > 0 else []
"""
    made = ModuleType("perturbed_module")
    made.__file__ = "/repo/perturbed_module.py"
    exec(source, made.__dict__)
    monkeypatch.setitem(__import__("sys").modules, "perturbed_module", made)
    return made


def watch(path: str, symbol: str) -> WatchedCalls:
    watched = WatchedCalls(path, symbol)
    watched.install(watched.find_places())
    return watched


def many(perturbation: WatchedCalls, call: Any) -> list[Any]:
    found = []
    for number in range(40):
        perturbation.begin(f"{number}", 0.5)
        found.append(call())
    perturbation.begin("", 0.0)
    return found


def test_arguments_of_methods_change_and_their_object_stays(module: ModuleType) -> None:
    box = module.Box()
    calls = {
        "Box.grow": lambda: box.grow(7),
        "Box.made": lambda: (box, box.made(7), None),
        "Box.named": lambda: (box, module.Box.named(7)[1], None),
    }
    for symbol, call in calls.items():
        perturbation = watch("/repo/perturbed_module.py", symbol)
        found = many(perturbation, call)
        assert {item[0] for item in found} == {box}
        assert 8 < sum(item[1] != 7 for item in found) < 32
        assert call()[1] == 7
    watch("/repo/perturbed_module.py", "Box.weight")
    assert box.weight == 5
    watch("/repo/perturbed_module.py", "Box.size")
    watch("/repo/perturbed_module.py", "Lid.size")
    watch("/repo/another.py", "down")


def test_only_outermost_calls_change(module: ModuleType) -> None:
    perturbation = watch("/repo/perturbed_module.py", "down")
    found = many(perturbation, lambda: module.down(6))
    assert all(numbers == list(range(len(numbers), 0, -1)) for numbers in found)
    assert len({len(numbers) for numbers in found}) > 2
