"""Problems whose tests a constant in place of the function passes are refused by that name."""

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
@pytest.mark.sampled(1)
def test_a_mutation_whose_tests_any_quiet_body_passes_is_no_problem(tmp_path, tries_stubs):
    write_source(tmp_path, {"src/kit/__init__.py": CODE, "tests/test_kit.py": TESTS})
    source = KIT.model_copy(update={"quotas": Quotas(mutation=16)})
    rules = ValidityRules(tries_stubs=tries_stubs)
    config = ProblemsConfig(repositories=(source,), rules=rules, oracle=OracleConfig(enabled=False))
    _, problems = build_set(tmp_path, config, "run")
    symbols = {problem.symbol for problem in problems if problem.kind == "mutation"}
    assert symbols == ({"half"} if tries_stubs else {"half", "announce"})
