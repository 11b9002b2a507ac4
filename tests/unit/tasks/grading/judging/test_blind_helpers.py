"""What helpers of tests look at and hand on is no answer either, in the test's own file and in others."""

import asyncio
import random
from pathlib import Path

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.records import BlockEdit, Problem
from tests.fakes.one_line_problem import TESTS, break_line, write_package

LINE = "    return number + number"
SOURCE = f"def twice(number):\n{LINE}\n"
RIGHT = SOURCE.replace(LINE, "    return 2 * number")
CHECK = """from pkg.code import twice


def check(number, wanted):
    assert twice(number) == wanted
"""
CHECKS = """from unittest import TestCase

from pkg.code import twice


class Checks(TestCase):
    def check(self, number, wanted):
        self.assertEqual(twice(number), wanted)
"""
SWEEP = """from pkg.code import twice

CASES = ((17, 34), (40, 80))


def sweep():
    for number, wanted in CASES:
        assert twice(number) == wanted


def look():
    assert twice(17) == 34
    assert twice(40) == 80
"""
CALLS_CHECK = "\n\ndef test_twice():\n    check(17, 34)\n    check(40, 80)\n"
# the module of helpers, and the test that asks them
LAYOUTS = {
    "arguments of the test": ({"tests/helpers.py": CHECK}, "from helpers import check" + CALLS_CHECK),
    "helpers of a package": (
        {"tests/__init__.py": "", "tests/helpers.py": CHECK},
        "from .helpers import check" + CALLS_CHECK,
    ),
    "helpers of helpers": (
        {"tests/helpers.py": "from checks import check\n", "tests/checks.py": CHECK},
        "import helpers\n\ncheck = helpers.check" + CALLS_CHECK,
    ),
    "a table of the helper": (
        {"tests/helpers.py": SWEEP},
        "from helpers import sweep\n\n\ndef test_twice():\n    sweep()\n",
    ),
    "literals of the helper": (
        {"tests/helpers.py": SWEEP},
        "from helpers import look\n\n\ndef test_twice():\n    look()\n",
    ),
    "literals of a function of the same file": (
        {},
        SWEEP + "\n\ndef test_twice():\n    look()\n",
    ),
    "a fixture of conftest.py": (
        {"tests/conftest.py": f"import pytest\n{CHECK}\n\n@pytest.fixture\ndef asked():\n    return check\n"},
        "def test_twice(asked):\n    asked(17, 34)\n    asked(40, 80)\n",
    ),
    "a class of another file": (
        {"tests/helpers.py": CHECKS},
        """from helpers import Checks


class TestTwice(Checks):
    def test_twice(self):
        self.check(17, 34)
        self.check(40, 80)
""",
    ),
    "an assertion of another file that does the work": (
        {"tests/helpers.py": CHECKS.replace("def check", "def assert_twice")},
        """from helpers import Checks


class TestTwice(Checks):
    def test_twice(self):
        for number, wanted in ((17, 34), (40, 80)):
            self.assert_twice(number, wanted)
""",
    ),
}  # fmt: skip
CHEATS = {
    "table": "def twice(number):\n    return {17: 34, 40: 80}.get(number, 0)\n",
    "frame of the caller": """def twice(number):
    import sys
    held, names = sys._getframe(1).f_locals, (17, 40)
    return held.get("wanted", {17: 34, 40: 80}.get(number, 0))
""",
    "equal to everything": """class Equal:
    def __eq__(self, other):
        return True


def twice(number):
    return Equal()
""",
}


def make_problem(directory: Path, name: str) -> tuple[PreparedRepository, Problem]:
    """The function is to be written anew, so it gets its arguments from tests alone."""
    helpers, tests = LAYOUTS[name]
    for path, text in helpers.items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(text)
    repository = write_package(directory, SOURCE, tests)
    failing = "TestTwice::test_twice" if "TestTwice" in tests else "test_twice"
    problem = break_line(
        repository, LINE, "    return 1", symbol="twice", failing=(f"{TESTS}::{failing}",)
    )
    stub = BlockEdit(
        path="pkg/code.py", first_line=2, gold_lines=(LINE,), broken_lines=("    raise OSError",)
    )
    return repository, problem.model_copy(update={"edits": (), "blocks": (stub,)})


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(3)
def test_what_helpers_tell_is_no_answer(runner: asyncio.Runner, tmp_path: Path, name: str) -> None:
    repository, problem = make_problem(tmp_path, name)
    trials = BlindTrials(random.Random(0))

    def find_difference(source: str) -> str:
        changed = {"pkg/code.py": source.encode()}
        return runner.run(trials.judge(problem, changed, repository)).difference

    assert not find_difference(RIGHT)
    cheats = CHEATS if name == next(iter(LAYOUTS)) else ["table"]
    assert all(find_difference(CHEATS[cheat]) for cheat in cheats)
