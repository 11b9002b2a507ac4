"""Broken states are judged by what their tests do, whatever they leave behind for the next test."""

import asyncio

import pytest

from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.config import Kind, ValidityRules
from ostinato.tasks.problems.proving.baseline import measure_baseline
from ostinato.tasks.problems.proving.judging import (
    ProofOutcome,
    RepositoryUnderTest,
    StubTrials,
    judge_candidate,
)
from ostinato.tasks.records import LineEdit

CODE = """import os
import sys
import tempfile
import threading
import time

SEEN = []


def add(one, two):
    \"\"\"Sum of two numbers.\"\"\"
    total = one + two
    return total


def seen():
    return list(SEEN)
"""
FIRST = """
from pkg.code import add, seen


def test_add():
    assert add(1, 2) == 3


def test_add_zero():
    assert add(0, 0) == 0


def test_nothing():
    assert seen() == []
"""
SECOND = """
import os
import tempfile
import threading

from pkg import code


def test_first():
    assert code.SEEN == []
    assert "LEFT" not in os.environ
    assert not os.path.exists(os.path.join(tempfile.gettempdir(), "left"))
    assert threading.active_count() == 1


def test_second():
    assert callable(code.add) and code.seen() == [] and sorted([2, 1]) == [1, 2]
"""
THIRD = """
import unittest

from pkg.code import add

TABLE = [add(1, 1)]


class Tests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.table = TABLE + [0]

    def test_table(self):
        self.assertEqual(len(self.table), 2)
"""
FILES = {
    "pkg/__init__.py": "",
    "pkg/code.py": CODE,
    "tests/test_a.py": FIRST,
    "tests/test_b.py": SECOND,
    "tests/test_c.py": THIRD,
}
LINE = "    total = one + two"
ADD, ZERO = "tests/test_a.py::test_add", "tests/test_a.py::test_add_zero"
# what stands in the place of the line, the finding, and the tests that fail; by day every third, of three findings
CHANGES = {
    "wrong": ("total = one - two", ProofOutcome.PROVEN, {ADD}),
    "leaves a global": ("SEEN.append(one); total = -1", ProofOutcome.PROVEN, {ADD, ZERO}),
    "leaves a file": (
        "open(tempfile.gettempdir() + '/left', 'w').close(); total = one * two",
        ProofOutcome.PROVEN,
        {ADD},
    ),
    "equal": ("total = two + one", ProofOutcome.SURVIVED, set()),
    "leaves a variable": (
        "os.environ['LEFT'] = '1'; total = one * two",
        ProofOutcome.PROVEN,
        {ADD},
    ),
    "leaves a thread": (
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); total = -1",
        ProofOutcome.PROVEN,
        {ADD, ZERO},
    ),
    "leaves a module": (
        "sys.modules['pkg.code'] = None; total = -1",
        ProofOutcome.PROVEN,
        {ADD, ZERO},
    ),
    "ends the process": ("total = two or os._exit(3)", ProofOutcome.TIMEOUT, set()),
    "hangs": ("total = 0\n    while two == 2: pass", ProofOutcome.TIMEOUT, set()),
    "breaks the import of another file": ("total = one.two", ProofOutcome.BREAKS_IMPORT, set()),
    "breaks it and passes": ("total = 3 / (two - 1)", ProofOutcome.BREAKS_IMPORT, set()),
    "does not parse": ("total = = one", ProofOutcome.BREAKS_IMPORT, set()),
}
RULES = ValidityRules(
    max_failing_ratio=0.9, cheater_share=1.0, tries_right_fix=False, time_limit_seconds=4.0
)


@pytest.fixture(scope="module")
def under_test(runner: asyncio.Runner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    repository = PreparedRepository.from_directory("kit", folder, ("pkg",), ("tests",))
    limits = SandboxLimits(memory_bytes=2 << 30)
    server, second = (TestServer(repository, limits, hash_seed=seed) for seed in (0, 1))
    baseline = runner.run(measure_baseline(server, second, RULES, 0))
    assert len(baseline.tests) == 6
    yield RepositoryUnderTest(baseline, server, second, RULES, StubTrials(server, 20.0))
    for one in (server, second):
        runner.run(one.close())


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled(4)
def test_a_change_is_judged_by_what_each_test_does_alone(runner, under_test, name):
    """What a change leaves behind (globals, files, variables, threads) decides nothing, and so do the tests of other
    files that run behind its own.
    """
    broken, finding, failing = CHANGES[name]
    edit = LineEdit(
        path="pkg/code.py",
        line_number=CODE.split("\n").index(LINE) + 1,
        gold_text=LINE,
        broken_text=f"    {broken}",
    )
    candidate = Candidate(
        repository="kit",
        kind=Kind.MUTATION,
        operator=name.replace(" ", "_"),
        path="pkg/code.py",
        symbol="add",
        first_line=10,
        last_line=13,
        edits=(edit,),
        touched=(("pkg/code.py", 10, "add"),),
    )
    found = runner.run(judge_candidate(candidate, under_test))
    assert (found.finding, set(found.fail_to_pass)) == (finding, failing)
    server = under_test.server
    files = candidate.broken_files(server.repository.files)
    for test in (*found.fail_to_pass, *found.pass_to_pass):
        assert runner.run(server.run_again(files, [test])).passed == (test not in failing)
        assert runner.run(server.run_again({}, [test])).passed


@pytest.mark.parametrize(
    ("second", "finding"),
    [("return [1]", ProofOutcome.PROVEN), ("return [*SEEN]", ProofOutcome.PLACE_UNTESTED)],
)
def test_every_place_of_a_bug_fails_a_test_of_its_own(runner, under_test, second, finding) -> None:
    """Otherwise a repair of the other places would pass."""
    lines = CODE.split("\n")
    edits = tuple(
        LineEdit(
            path="pkg/code.py",
            line_number=lines.index(gold) + 1,
            gold_text=gold,
            broken_text=f"    {broken}",
        )
        for gold, broken in ((LINE, "total = one - two"), ("    return list(SEEN)", second))
    )
    candidate = Candidate(
        repository="kit",
        kind=Kind.MULTI_PLACE,
        operator="integer",
        path="pkg/code.py",
        symbol="add",
        first_line=10,
        last_line=13,
        edits=edits,
        touched=(("pkg/code.py", 10, "add"), ("pkg/code.py", 16, "seen")),
    )
    found = runner.run(judge_candidate(candidate, under_test))
    assert found.finding is finding
    if finding is ProofOutcome.PROVEN:
        assert {ADD, "tests/test_a.py::test_nothing"} <= set(found.fail_to_pass)
