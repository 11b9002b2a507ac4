"""A right fix is paid however it is written: each way of the generator, on one function that it fits."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.judging.blind_trial import BlindTrials, Differences
from ostinato.tasks.records import Problem
from tests.benchmarks.equivalent_rewrites import judge_rewrites
from tests.fakes.equivalent_rewrites import REWRITES, rewrite_function
from tests.fakes.one_line_problem import (
    PATH,
    break_line,
    make_one_line_problem,
    write_package,
)
from tests.fakes.repositories import running_server

SOURCE = '''def sizes(words, least=1):
    """Words by length, long ones last."""
    found = []
    for word in words:
        if len(word) >= least:
            found.append((len(word), word))
    if not found:
        return []
    return sorted(found)


def label(number, short=False):
    kind = "even" if number % 2 == 0 else "odd"
    if short and number > 3:
        return kind[0]
    elif number == 1:
        return "one"
    elif number == 2:
        return "two"
    else:
        return f"{kind} {number}"


def doubled(numbers):
    for number in numbers:
        yield number * 2


def walk(tree):
    yield tree[0]
    for part in tree[1:]:
        yield from walk(part)


def squares(numbers):
    return [number * number for number in numbers]


class Shelf:
    def __init__(self, books):
        self.books = list(books)

    def titles(self, upper=False):
        return [book.upper() if upper else book for book in self.books]

    @property
    def count(self):
        return len(self.books) + 0
'''
TESTS = """from pkg.code import Shelf, doubled, label, sizes, squares, walk


def test_sizes():
    assert sizes(["abc", "a", "", "bb"]) == [(1, "a"), (2, "bb"), (3, "abc")]
    assert sizes([], 3) == []


def test_label():
    assert [label(number) for number in (1, 2, 3, 4)] == ["one", "two", "odd 3", "even 4"]
    assert label(8, short=True) == "e"


def test_doubled():
    assert list(doubled([1, 2, 3])) == [2, 4, 6]


def test_walk():
    assert list(walk([1, [2, [3]], [4]])) == [1, 2, 3, 4]


def test_squares():
    assert squares([1, 2, 3]) == [1, 4, 9]


def test_shelf():
    shelf = Shelf(["one", "two"])
    assert shelf.titles(True) == ["ONE", "TWO"]
    assert shelf.count == 2
"""
SQUARES = "    return [number * number for number in numbers]"
TITLES = "        return [book.upper() if upper else book for book in self.books]"
# symbol: a line, its broken form, the test
PROBLEMS = {
    "sizes": ("        if len(word) >= least:", "        if len(word) > least:", "test_sizes"),
    "label": ("    if short and number > 3:", "    if short or number > 3:", "test_label"),
    "doubled": ("        yield number * 2", "        yield number * 3", "test_doubled"),
    "walk": ("    for part in tree[1:]:", "    for part in tree[2:]:", "test_walk"),
    "squares": (SQUARES, SQUARES.replace("*", "+"), "test_squares"),
    "Shelf.titles": (TITLES, TITLES.replace("upper()", "lower()"), "test_shelf"),
    "Shelf.count": ("        return len(self.books) + 0", "        return len(self.books) + 1", "test_shelf"),
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> PreparedRepository:
    return write_package(tmp_path_factory.mktemp("ways"), SOURCE, TESTS)


@pytest.fixture(scope="module")
def server(runner: asyncio.Runner, repository: PreparedRepository) -> Iterator[TestServer]:
    with running_server(runner, repository) as server:
        yield server


@pytest.fixture(scope="module")
def trials() -> BlindTrials:
    return BlindTrials()


def first_symbol(repository: PreparedRepository, way: str) -> str:
    """The first function that can be written this way."""
    source = repository.files[PATH]
    fitting = (symbol for symbol in PROBLEMS if way in rewrite_function(source, PATH, symbol))
    return next(fitting)


def make_problem(repository: PreparedRepository, symbol: str) -> Problem:
    line, broken, test = PROBLEMS[symbol]
    failing = (f"tests/test_code.py::{test}",)
    return break_line(repository, line, broken, symbol=symbol, failing=failing)


def test_there_are_twenty_ways() -> None:
    assert len(REWRITES) >= 20


@pytest.mark.parametrize("way", REWRITES)
@pytest.mark.sampled(3)
def test_a_right_fix_is_paid_however_it_is_written(
    runner: asyncio.Runner,
    repository: PreparedRepository,
    server: TestServer,
    trials: BlindTrials,
    way: str,
) -> None:
    problem = make_problem(repository, first_symbol(repository, way))
    rows = runner.run(judge_rewrites(problem, repository, server, trials, frozenset({way})))
    assert rows == {way: ""}


HELD = """from datetime import timedelta, tzinfo
from functools import partial
from os.path import getmtime
from typing import NamedTuple


def drop(count, items):
    return list(items)[count:]


rest = partial(drop, 1)


class Row(NamedTuple):
    name: str
    line: object


def ruled(width, sign="-"):
    return sign * width


PLAIN = {"plain": Row("plain", ruled)}


class Zone(tzinfo):
    def utcoffset(self, moment):
        return timedelta(0)

    def dst(self, moment):
        return timedelta(0)


def written():
    return getmtime(__file__)
"""
OF_HELD = """from datetime import timedelta
from pkg.code import PLAIN, Zone, drop, rest


def test_drop():
    assert drop(1, "abcd") == ["b", "c", "d"]
    assert rest("wxyz") == ["x", "y", "z"]


def test_ruled():
    assert PLAIN["plain"].line(7) == "-------"


def test_dst():
    assert Zone().dst(None) == timedelta(0)
"""
DST = "    def dst(self, moment):\n        return timedelta(0)\n"
HELD_FIXES = {
    "partial of a partial": ("drop", "    return list(items)[count:]", [
        ("def drop(", "def _drop("), ("\n\n\nrest", "\n\n\ndrop = partial(_drop)\nrest")]),
    "object in a named tuple": ("ruled", "    return sign * width", [
        ('def ruled(width, sign="-"):\n    return sign * width\n',
         'class _Ruled:\n    def __call__(self, width, sign="-"):\n        return sign * width\n\n\nruled = _Ruled()\n')]),
    "base beside one in C": ("Zone.dst", "    def dst(self, moment):", [
        (DST, ""), ("class Zone(tzinfo)", f"class Parts:\n    __slots__ = ()\n{DST}\n\nclass Zone(Parts, tzinfo)")]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD_FIXES)
@pytest.mark.sampled(1)
def test_right_fix_of_what_others_hold_is_accepted(runner, tmp_path: Path, name: str) -> None:
    """Times of files differ between boxes (`written`), and nobody wants those of the original's."""
    symbol, line, changes = HELD_FIXES[name]
    broken = line.replace("[count:]", "[:count]").replace("* width", "* 2").replace("dst(", "dts(")
    failing = f"test_{symbol.rpartition('.')[2]}"
    repository, problem = make_one_line_problem(
        tmp_path, HELD, OF_HELD, (line, broken), symbol=symbol, failing=failing
    )
    text = HELD
    for change in changes:
        assert change[0] in text
        text = text.replace(*change)
    trials = BlindTrials()
    assert runner.run(trials.judge(problem, {PATH: text.encode()}, repository)) == Differences()
    assert runner.run(
        trials.judge(problem, problem.break_files(repository.files), repository)
    ).difference
