"""What a test compares is shown with the comparison's answer, so that comparisons are judged too."""

import asyncio

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_tests import take_expectations_out
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from tests.fakes.one_line_problem import PATH, break_line, write_package
from tests.fakes.one_line_problem import TESTS as TESTS_PATH
from tests.fakes.trials import find_difference

SOURCE = """class Version:
    def __init__(self, *parts):
        self.parts = parts

    def __eq__(self, other):
        return self.parts == getattr(other, "parts", other)

    def __lt__(self, other):
        return self.parts < other.parts

    def __contains__(self, part):
        return part in self.parts

    def __bool__(self):
        return any(self.parts)
"""
TESTS = """from pkg.code import Version


def test_eq():
    assert Version(1, 2) == Version(1, 2)
    assert Version(1, 2) != Version(2, 2)
    assert not (Version(1, 3) == (1, 4))


def test_lt():
    assert Version(1, 2) < Version(1, 3)
    assert not Version(4) < Version(3)


def test_contains():
    assert 3 in Version(1, 3)
    assert 5 not in Version(1, 3)


def test_bool():
    assert Version(0, 1)
    assert not Version(0, 0)
"""
# by method: the line that is right, the broken one, another right one, and what answers always
CASES = {
    "eq": (
        '        return self.parts == getattr(other, "parts", other)',
        '        return self.parts != getattr(other, "parts", other)',
        '        theirs = getattr(other, "parts", other); return theirs == self.parts',
        ("        return True", "        return False", "        return self is not other"),
    ),
    "lt": (
        "        return self.parts < other.parts",
        "        return self.parts > other.parts",
        "        return other.parts > self.parts",
        ("        return True", "        return self.parts <= other.parts or True"),
    ),
    "contains": (
        "        return part in self.parts",
        "        return part not in self.parts",
        "        return any(part == one for one in self.parts)",
        ("        return True", "        return False"),
    ),
    "bool": (
        "        return any(self.parts)",
        "        return not any(self.parts)",
        "        return sum(map(bool, self.parts)) > 0",
        ("        return True", "        return False"),
    ),
}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> PreparedRepository:
    return write_package(tmp_path_factory.mktemp("versions"), SOURCE, TESTS, name="versions")


@pytest.mark.parametrize("method", CASES)
@pytest.mark.sampled(1)
def test_a_comparison_is_judged_by_its_answers(
    runner: asyncio.Runner, versions: PreparedRepository, method: str
) -> None:
    gold, broken, other, stubs = CASES[method]
    symbol, failing = f"Version.__{method}__", (f"{TESTS_PATH}::test_{method}",)
    problem = break_line(versions, gold, broken, symbol=symbol, failing=failing)
    trials = BlindTrials()

    def judge(line: str) -> str:
        changed = SOURCE.replace(gold, line).encode()
        return runner.run(find_difference(trials, problem, {PATH: changed}, versions))

    assert judge(other) == ""
    for stub in (broken, *stubs):
        assert "differs from the original" in judge(stub), stub


def test_literals_of_a_comparison_stay_out_of_the_box_but_where_it_is_what_is_judged() -> None:
    text = b"def test_it():\n    assert f(2) == 424242\n    assert f(g()) == h(3)\n"
    shown = take_expectations_out(text, frozenset({"test_it"})).decode()
    assert "424242" not in shown
    assert "g()" in shown
    assert "h(3)" in shown
    judged = take_expectations_out(text, frozenset({"test_it"}), with_literals=True).decode()
    assert "424242" in judged
