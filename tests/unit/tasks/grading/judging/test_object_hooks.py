"""Hooks of objects that raise or act hide nothing from a trial, nor does a call that acts and returns nothing."""

import asyncio
from pathlib import Path

import pytest

from ostinato.tasks.grading.judging.blind_trial import BlindTrials, Differences
from tests.fakes.one_line_problem import PATH, make_one_line_problem

HOOKS = {
    "raises another error": "return getattr(self.__dict__['store'], name)",
    "opens a shelf": "return getattr(self.shelf('spare'), name)",
    "sees who asks": "self.__dict__.setdefault('asked', []).append(name)\n        raise AttributeError(name)",
}
SOURCE = """class Shelf:
    def __init__(self, name):
        self.name = name


class Shop:
    def __init__(self, kind):
        self.kind = kind
        self.shelves = {}

    def open(self):
        self.store = self.kind()
        return self

    def shelf(self, name):
        if name not in self.shelves:
            self.shelves[name] = Shelf(name)
        return self.shelves[name]

    def close(self, name):
        self.shelves.pop(name, None)

    def __call__(self):
        return self.store

    def __getattr__(self, name):
        HOOK
"""
TESTS = """from pkg.code import Shop


def test_open():
    shop = Shop(dict).open()
    assert shop.kind is dict


def test_close():
    shop = Shop(dict).open()
    assert shop.shelf("tea").name == "tea"
    shop.close("tea")
    assert sorted(shop.shelves) == []
    assert sorted(vars(shop)) == ["kind", "shelves", "store"]
"""
BROKEN = {
    "Shop.__init__": ("        self.kind = kind", "        pass", "test_open"),
    "Shop.close": ("        self.shelves.pop(name, None)", "        pass", "test_close"),
}
RIGHT = {
    "Shop.__init__": ("        self.kind = kind", "        vars(self)['kind'] = kind"),
    "Shop.close": (
        "        self.shelves.pop(name, None)",
        "        dict.pop(self.shelves, name, None)",
    ),
}


@pytest.mark.parametrize("symbol", BROKEN)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.sampled(2)
def test_a_broken_state_is_told_from_the_original(
    runner: asyncio.Runner, tmp_path: Path, hook: str, symbol: str
) -> None:
    source = SOURCE.replace("HOOK", HOOKS[hook])
    line, broken, failing = BROKEN[symbol]
    repository, problem = make_one_line_problem(
        tmp_path, source, TESTS, (line, broken), symbol=symbol, failing=failing
    )
    trials = BlindTrials()
    right = {PATH: source.replace(*RIGHT[symbol]).encode()}
    assert runner.run(trials.judge(problem, right, repository)) == Differences()
    wrong = problem.break_files(repository.files)
    assert runner.run(trials.judge(problem, wrong, repository)).difference


SILENT = """class Kind:
    pass


KIND = Kind()


class Shelf:
    tally = []

    def __init__(self, kind, items):
        self.kind, self.items = kind, list(items)

    def fill(self, item):
        if self.kind is KIND:
            self.items.append(item)
"""
OF_SILENT = """from pkg.code import KIND, Kind, Shelf


def test_fill():
    empty = Shelf(Kind(), "ab")
    empty.fill("c")
    assert empty.items == ["a", "b"]
    shelf = Shelf(KIND, "ab")
    shelf.fill("c")
    assert shelf.items == ["a", "b", "c"]
"""
TIRING = {
    "of all": "        self.tally.append(0)\n        if len(self.tally) > 400:\n            return\n",
    "of one object": "        if len(self.items) > 300:\n            return\n",
}


@pytest.mark.parametrize("calls", TIRING)
def test_a_call_that_returns_nothing_acts_after_many_others_as_at_first(
    runner: asyncio.Runner, tmp_path: Path, calls: str
) -> None:
    """Its object is told by what it is, not by what it equals: a copy of the module's own would do nothing."""
    line, begin = "            self.items.append(item)", "        if self.kind is KIND:\n"
    repository, problem = make_one_line_problem(
        tmp_path, SILENT, OF_SILENT, (line, line.replace("item)", "self)")),
        symbol="Shelf.fill", failing="test_fill",
    )  # fmt: skip
    trials = BlindTrials()
    honest = SILENT.replace(line, "            self.items += [item]").encode()
    assert runner.run(trials.judge(problem, {PATH: honest}, repository)) == Differences()
    tired = SILENT.replace(begin, TIRING[calls] + begin).encode()
    assert runner.run(trials.judge(problem, {PATH: tired}, repository)).difference


def test_a_call_that_returns_nothing_acts_on_what_no_test_gives_it(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    source = SOURCE.replace("HOOK", "raise AttributeError(name)")
    line, broken, failing = BROKEN["Shop.__init__"]
    repository, problem = make_one_line_problem(
        tmp_path, source, TESTS, (line, broken), symbol="Shop.__init__", failing=failing
    )
    trials = BlindTrials()
    known = source.replace(line, f"        if kind is dict:\n    {line}").encode()
    assert "drawn" in runner.run(trials.judge(problem, {PATH: known}, repository)).difference
    right = source.replace(line, "        setattr(self, 'kind', kind)").encode()
    assert runner.run(trials.judge(problem, {PATH: right}, repository)) == Differences()
