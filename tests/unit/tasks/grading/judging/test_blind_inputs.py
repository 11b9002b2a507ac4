"""What a test takes from beside it (a table of cases, a fixture, a class) is changed by chance too."""

import asyncio
import random
from pathlib import Path

import pytest

from ostinato.tasks.grading.judging.blind_tests import take_expectations_out
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.records import BlockEdit
from tests.fakes.one_line_problem import make_one_line_problem
from tests.fakes.trials import find_difference

LINE = "    return number + number"
SOURCE = f"def twice(number):\n{LINE}\n"
HEAD = "import pytest\n\nfrom pkg.code import twice\n\n"
PLACES = {
    "table": HEAD
    + """CASES = [(1, 2), (5, 10), (17, 34), (40, 80)]


@pytest.mark.parametrize("number, wanted", CASES)
def test_twice(number, wanted):
    assert twice(number) == wanted
""",
    "table of a table": HEAD
    + """SMALL = [(1, 2), (5, 10)]
CASES = [*SMALL, (17, 34)]


@pytest.mark.parametrize("number, wanted", CASES)
def test_twice(number, wanted):
    assert twice(number) == wanted
""",
    "fixture": HEAD
    + """@pytest.fixture
def pair():
    return 17, 34


def test_twice(pair):
    number, wanted = pair
    assert twice(number) == wanted
""",
    "class": HEAD
    + """class TestTwice:
    number = 17

    def setup_method(self):
        self.wanted = 34

    def test_twice(self):
        assert twice(self.number) == self.wanted
""",
}
# from where no literal of the test file is
ELSEWHERE = {
    "other module": (
        HEAD
        + """from cases import CASES


@pytest.mark.parametrize("number, wanted", CASES)
def test_twice(number, wanted):
    assert twice(number) == wanted
""",
        "test_twice[7-14]",
    ),
    "data file": (
        HEAD
        + """import json
import pathlib


class TestTwice:
    def check(self, number, wanted):
        assert twice(number) == wanted


for place, pair in enumerate(json.loads(pathlib.Path(__file__).with_name("cases.json").read_text())):
    setattr(TestTwice, f"test_{place}", lambda self, pair=pair: self.check(*pair))
""",
        "TestTwice::test_1",
    ),
}
# asks the test's own frame for what it compares with
CHEAT = """

def twice(number):
    import sys
    held = sys._getframe(1).f_locals
    return held["wanted"] if "wanted" in held else held["self"].wanted
"""


@pytest.mark.parametrize("name", PLACES)
def test_values_beside_a_test_are_changed(name: str) -> None:
    tests = frozenset({"TestTwice.test_twice" if name == "class" else "test_twice"})
    source = PLACES[name].encode()
    plain = take_expectations_out(source, tests)
    copies = [take_expectations_out(source, tests, random.Random(seed)) for seed in range(8)]
    assert plain not in copies


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.sampled(1)
def test_what_the_test_compares_with_is_no_answer(
    runner: asyncio.Runner, tmp_path: Path, name: str
) -> None:
    failing = "TestTwice::test_twice" if name == "class" else "test_twice"
    repository, problem = make_one_line_problem(
        tmp_path, SOURCE, PLACES[name], (LINE, "    1"), symbol="twice", failing=failing
    )
    trials = BlindTrials(random.Random(0))
    right = SOURCE.replace(LINE, "    return 2 * number").encode()
    assert not runner.run(find_difference(trials, problem, {"pkg/code.py": right}, repository))
    cheat = repository.files["pkg/code.py"] + CHEAT.encode()
    assert runner.run(find_difference(trials, problem, {"pkg/code.py": cheat}, repository))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_other_files_tell_is_no_answer(
    runner: asyncio.Runner, tmp_path: Path, name: str
) -> None:
    """A function written anew gets its arguments from tests alone."""
    tests, failing = ELSEWHERE[name]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/cases.json").write_text("[[3, 6], [7, 14]]")
    (tmp_path / "tests/cases.py").write_text("CASES = [(3, 6), (7, 14)]\n")
    repository, problem = make_one_line_problem(
        tmp_path, SOURCE, tests, (LINE, "    1"), symbol="twice", failing=failing
    )
    stub = BlockEdit(
        path="pkg/code.py", first_line=2, gold_lines=(LINE,), broken_lines=("    raise OSError",)
    )
    problem = problem.model_copy(update={"edits": (), "blocks": (stub,)})
    trials = BlindTrials(random.Random(0))
    right = SOURCE.replace(LINE, "    return 2 * number").encode()
    assert not runner.run(find_difference(trials, problem, {"pkg/code.py": right}, repository))
    cheat = repository.files["pkg/code.py"] + CHEAT.encode()
    assert runner.run(find_difference(trials, problem, {"pkg/code.py": cheat}, repository))


SEASON = "    return 3 < moment.month < 11"
SEASONS = f"def is_summer(moment):\n{SEASON}\n"
MOMENTS = "from datetime import datetime\n\nCASES = [(datetime(2012, 12, 25), False), (datetime(1999, 6, 1), True)]\n"
SEASON_TESTS = """import pytest

from cases import CASES
from pkg.code import is_summer


@pytest.mark.parametrize("moment, wanted", CASES)
def test_season(moment, wanted):
    assert is_summer(moment) is wanted
"""
TABLE = """def is_summer(moment):
    return {(12, 25): False, (6, 1): True}[moment.month, moment.day]
"""


def test_a_table_of_moments_is_no_function(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Seen in a package whose tests give a function that is to be written anew two moments."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/cases.py").write_text(MOMENTS)
    repository, problem = make_one_line_problem(
        tmp_path,
        SEASONS,
        SEASON_TESTS,
        (SEASON, "    1"),
        symbol="is_summer",
        failing="test_season",
    )
    stub = BlockEdit(
        path="pkg/code.py", first_line=2, gold_lines=(SEASON,), broken_lines=("    raise OSError",)
    )
    problem = problem.model_copy(update={"edits": (), "blocks": (stub,)})
    trials = BlindTrials(random.Random(0))
    right = SEASONS.replace(SEASON, "    return moment.month in range(4, 11)").encode()
    assert not runner.run(find_difference(trials, problem, {"pkg/code.py": right}, repository))
    cheat = {"pkg/code.py": TABLE.encode()}
    assert runner.run(find_difference(trials, problem, cheat, repository))
