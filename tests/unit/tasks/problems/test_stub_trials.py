"""Problems whose tests a constant in place of the function passes, and problems that nobody can solve, are refused by name."""

import json

import pytest

from ostinato.tasks.problems.config import OracleConfig, ProblemsConfig, Quotas, ValidityRules
from tests.unit.tasks.problems.builds import build_set
from tests.unit.tasks.problems.test_left_out import KIT, write_source

CODE = """
def announce(items):
    text = ", ".join(items)
    return print(text)


def half(number):
    rest = number % 2
    return (number - rest) // 2
"""
TESTS = """
from kit import announce, half


def test_half():
    assert half(7) == 3


def test_announce():
    announce(["a", "b"])


def test_nothing():
    assert half.__name__ == "half"
"""


def test_a_deleted_function_whose_tests_any_quiet_body_passes_is_no_problem(tmp_path):
    write_source(tmp_path, {"src/kit/__init__.py": CODE, "tests/test_kit.py": TESTS})
    source = KIT.model_copy(update={"quotas": Quotas(mutation=0, deleted_function=2)})
    config = ProblemsConfig(repositories=(source,), oracle=OracleConfig(enabled=False))
    _, problems = build_set(tmp_path, config, "run")
    assert {problem.symbol for problem in problems} == {"half"}
    statistics = json.loads((tmp_path / "run" / "problems" / "statistics.json").read_text())
    assert statistics["findings"] == {"proven": 1, "stub_passes": 1}


@pytest.mark.parametrize("tries_stubs", [False, True])
@pytest.mark.nightly
def test_a_mutation_whose_tests_any_quiet_body_passes_is_no_problem(tmp_path, tries_stubs):
    write_source(tmp_path, {"src/kit/__init__.py": CODE, "tests/test_kit.py": TESTS})
    source = KIT.model_copy(update={"quotas": Quotas(mutation=16)})
    rules = ValidityRules(tries_stubs=tries_stubs)
    config = ProblemsConfig(repositories=(source,), rules=rules, oracle=OracleConfig(enabled=False))
    _, problems = build_set(tmp_path, config, "run")
    symbols = {problem.symbol for problem in problems if problem.kind == "mutation"}
    assert symbols == ({"half"} if tries_stubs else {"half", "announce"})


# what `turn` gets is of no other run, so a trial compares nothing of it
UNREAD = """
def turn(text):
    head = text[:3]
    return text[3:] + head


def half(number):
    rest = number % 2
    return (number - rest) // 2
"""
HALF = """
from kit import half


def test_half():
    assert half(7) == 3
    assert half(8) == 4


def test_nothing():
    assert half.__name__ == "half"
"""
DRAWS = """
import os

from kit import turn


def test_turn():
    text = os.urandom(8).hex()
    assert turn(text) == text[3:] + text[:3]


def test_nothing():
    assert turn.__name__ == "turn"
"""
MEASURES = """
import inspect

import kit


def test_turn():
    assert kit.turn("abcdef") == "defabc" and len(inspect.getsource(kit).splitlines()) == 9


def test_nothing():
    assert kit.turn.__name__ == "turn"
"""


@pytest.mark.parametrize("tests", [DRAWS, MEASURES], ids=["no trial separates", "reads its source"])
@pytest.mark.sampled(1)
def test_a_problem_whose_right_fix_the_grader_refuses_is_none(tmp_path, tests):
    write_source(
        tmp_path,
        {"src/kit/__init__.py": UNREAD, "tests/test_half.py": HALF, "tests/test_turn.py": tests},
    )
    source = KIT.model_copy(update={"quotas": Quotas(mutation=8)})
    rules = ValidityRules(tries_stubs=False)
    config = ProblemsConfig(repositories=(source,), rules=rules, oracle=OracleConfig(enabled=False))
    result, problems = build_set(tmp_path, config, "run")
    operators = {(problem.symbol, problem.operator) for problem in problems}
    assert ("half", "integer") in operators
    assert ("turn", "slice_bound") not in operators
    statistics = json.loads((tmp_path / "run" / "problems" / "statistics.json").read_text())
    refused = statistics["findings"]["right_fix_refused"]
    assert refused == statistics["dropped"]["right_fix_refused"] > 0
    [row] = result.yield_table
    assert f"right_fix_refused {refused}" in str(row["refused"])
    assert row["published"] == len(problems) == row["proven"]
