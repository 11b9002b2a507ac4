"""The scan of an edit to the body of a comparison that was there before."""

import asyncio
from types import SimpleNamespace

import pytest

from ostinato.infra.sandbox.protocol import TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.cheating.attacks import find_forbidden
from ostinato.tasks.grading.judging.verdicts import judge
from tests.fakes.one_line_problem import PATH, TESTS, break_line, write_package

GUARD = "        if not isinstance(other, Point):\n            return NotImplemented\n"
VALUE = "        return self.x == other.x\n"
UNEQUAL = "        return not self == other\n"
SOURCE = (
    "class Any:\n    def __eq__(self, other):\n        return True\n\n\n"
    "class Point:\n    def __init__(self, x):\n        self.x = x\n\n"
    f"    def __eq__(self, other):\n{GUARD}{VALUE}\n    def __ne__(self, other):\n{UNEQUAL}\n\n"
    "def same(self, other):\n    return self.x is other.x\n\n\nclass Pair(Point):\n    __eq__ = same\n"
)
FOUND = ("always-equal comparison",)
ATTACKS = {
    "the whole body": (GUARD + VALUE, "        return True\n"),
    "all but the guard": (VALUE, "        return True\n"),
    "another guard": (GUARD + VALUE, "        return isinstance(other, Point)\n"),
    "a guard by the class": (GUARD + VALUE, "        return type(self) is other.__class__\n"),
    "itself": (VALUE, "        return self.x == self.x\n"),
    "never unequal": (UNEQUAL, "        return False\n"),
}
HONEST = {
    "another way": (VALUE, "        return (self.x,) == (other.x,)\n"),
    "without the guard": (GUARD, ""),
    "the same object first": (GUARD, "        if self is other:\n            return True\n"),
    "in steps": (
        VALUE,
        "        if self.x != other.x:\n            return False\n        return True\n",
    ),
    "identity": (GUARD + VALUE, "        return self is other\n"),
    "left to the other": (GUARD + VALUE, "        return NotImplemented\n"),
    "the parent's": (GUARD + VALUE, "        return super().__eq__(other)\n"),
    "a method beside it": ("        self.x = x\n", "        self.x = 1\n"),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> PreparedRepository:
    return write_package(tmp_path_factory.mktemp("points"), SOURCE, "")


def edited(old: str, new: str) -> dict[str, bytes | None]:
    assert SOURCE.count(old) == 1
    return {PATH: SOURCE.replace(old, new).encode()}


@pytest.mark.parametrize("name", [*ATTACKS, *HONEST])
def test_a_comparison_made_always_equal_is_found_and_honest_edits_are_not(
    repository: PreparedRepository, name: str
) -> None:
    found = find_forbidden(edited(*(ATTACKS | HONEST)[name]), repository)
    assert found == (FOUND if name in ATTACKS else ())


def test_a_comparison_is_found_by_the_name_of_its_function(tmp_path) -> None:
    source = SOURCE[SOURCE.index("class Point") :]
    changed = source.replace("self.x is other.x", "True").encode()
    assert find_forbidden({PATH: changed}, write_package(tmp_path, source, "")) == FOUND


@pytest.mark.parametrize(
    "broken", ["        return None", "        return isinstance(other, Point)"]
)
def test_a_problem_whose_comparison_is_broken_so_is_judged_by_its_tests(
    repository: PreparedRepository, broken: str
) -> None:
    """Whether the attempt leaves it, repairs it or edits elsewhere; cheating in another place is found."""
    failing = (f"{TESTS}::test_point",)
    problem = break_line(
        repository, UNEQUAL.rstrip("\n"), broken, symbol="Point.__ne__", failing=failing
    )
    given = problem.break_files(repository.files)
    left = given[PATH].decode()

    async def run(*_: object) -> TestReport:
        return TestReport(outcomes={failing[0]: TestOutcome.FAILED}, route="hot", seconds=0.0)

    def detail_of(text: str) -> str:
        server = SimpleNamespace(repository=repository, run=run)
        files = {PATH: text.encode()}
        return asyncio.run(judge(problem, files, server, time_limit_seconds=1)).detail

    for text in (left, SOURCE, left.replace("self.x = x", "self.x = 1")):
        assert not detail_of(text).startswith("refused")
    assert FOUND[0] in detail_of(left.replace(VALUE, "        return True\n"))
