"""Tests that do not end cost a blind trial seconds: subtests too have a limit, and one per file is enough."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging import blind_trial
from ostinato.tasks.grading.judging.blind_trial import LIMITS, Shown, observe, prepare_trial
from ostinato.tasks.records import Problem
from tests.fakes.one_line_problem import make_one_line_problem

NUM_SUBTESTS = 5
TESTS = f"""import unittest

from pkg.code import f


class TestF(unittest.TestCase):
    def test_small(self):
        for number in range({NUM_SUBTESTS}):
            with self.subTest(number=number):
                self.assertEqual(f(number), number + 1)

    def test_large(self):
        for number in range(1000, 1000 + {NUM_SUBTESTS}):
            with self.subTest(number=number):
                self.assertEqual(f(number), number + 1)
"""
FAILING = ("TestF::test_small", "TestF::test_large")


@pytest.fixture
def endless(tmp_path: Path) -> tuple[PreparedRepository, Problem]:
    repository, problem = make_one_line_problem(
        tmp_path,
        "def f(number):\n    while False:\n        pass\n    return number + 1\n",
        TESTS,
        ("    while False:", "    while True:"),
        symbol="f",
        failing=FAILING[0],
    )
    path = problem.fail_to_pass[0].partition("::")[0]
    tests = tuple(f"{path}::{name}" for name in FAILING)
    return repository, problem.model_copy(update={"fail_to_pass": tests})


@pytest.mark.timeout(90)  # a subtest without a limit takes three minutes
@pytest.mark.nightly
def test_a_change_whose_subtests_never_end_is_told_from_the_original_soon(
    runner: asyncio.Runner, endless: tuple[PreparedRepository, Problem]
) -> None:
    repository, problem = endless
    trial = runner.run(prepare_trial(problem, repository, random.Random(1)))
    assert trial.separates
    facts = {test: seen for test, seen in trial.facts.items() if test}  # not those of imports
    assert facts
    assert all(any(fact.startswith("returns") for fact in seen) for seen in facts.values())

    broken = repository.keep_editable(problem.break_files(repository.files))

    async def observe_broken() -> Shown:
        async with open_box(repository, {**broken, **trial.drawn.files}, LIMITS) as sandbox:
            return await observe(sandbox, trial.drawn, wanted=trial.wanted)

    ends = Counter(
        (test.partition("::")[0], value["ended"])
        for test, values in runner.run(observe_broken()).values.items()
        for value in values
        if isinstance(value, dict) and "ended" in value
    )
    files = {test.partition("::")[0] for test in trial.drawn.tests}
    # the first of a file takes too long, and the other does not begin
    assert ends == {(file, end): 1 for file in files for end in ("CallTimeout", "TimeoutError")}


MANY = "import time\nimport pytest\nfrom pkg.code import f\n\n\n" + "\n\n".join(
    f"def test_{number}():\n    time.sleep(0.1)\n    assert f({number}) == {number + 1}\n"
    for number in range(6)
)


@pytest.mark.nightly
def test_a_trial_on_a_busy_machine_has_all_its_tests(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # waits stand for the processor time of others: the original's tests do not end within the first limit
    monkeypatch.setattr(blind_trial, "_SECONDS", 2.0)
    repository, problem = make_one_line_problem(
        tmp_path,
        "def f(number):\n    return number + 1\n",
        MANY,
        ("    return number + 1", "    return number + 2"),
        symbol="f",
        failing="test_0",
    )
    path = problem.fail_to_pass[0].partition("::")[0]
    tests = tuple(f"{path}::test_{number}" for number in range(6))
    problem = problem.model_copy(update={"fail_to_pass": tests})
    trial = runner.run(prepare_trial(problem, repository, random.Random(1)))
    assert trial.is_complete
    assert trial.limit_seconds > 2.0
    names = {test.partition("#")[0].rpartition("::")[2] for test in trial.wanted}
    assert names >= {f"test_{number}" for number in range(6)}
