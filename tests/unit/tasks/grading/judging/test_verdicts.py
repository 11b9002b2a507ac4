"""Gold passes, no-op fails, and every known way to cheat fails."""

import json

import pytest

from ostinato.infra.platform.errors import GradingError
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CallRequest, make_calls
from ostinato.tasks.grading.cheating.attacks import find_forbidden
from ostinato.tasks.grading.judging.verdicts import judge
from ostinato.tasks.records import FunctionOracle, OracleCall
from tests.unit.tasks.grading.conftest import PATH

TESTS = "tests/test_counting.py"
PASSING_TESTS = (
    b"def test_count_words(): pass\n"
    b"def test_count_words_minimum(): pass\n"
    b"def test_longest_word(): pass\n"
)
PATCH_PYTEST = (
    "import _pytest.runner\n"
    "_pytest.runner.call_and_report.__code__ = (lambda item, when, log=True, **k: None).__code__\n"
)
PATCH_ASSERTS = "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
# builds forbidden words at run time, so that the scan of the text sees none of them
SNEAK = "import importlib\nmodule = importlib.import_module('_py' + 'test.runner')\n"
SNEAK_REPORT = (
    SNEAK
    + "module.check_interactive_exception = None\n"
    + "module.CallInfo.from_call = classmethod(lambda c, *a, **k: c)\n"
)


def judge_files(runner, problem, server, files):
    return runner.run(judge(problem, files, server, time_limit_seconds=120))


@pytest.fixture
def broken(problem, repository):
    return problem.break_files(repository.files)


def with_prefix(broken, text):
    return {PATH: text.encode() + broken[PATH]}


def with_body(broken, line):
    return {PATH: broken[PATH].replace(b"    total = 0\n", f"    {line}\n    total = 0\n".encode())}


def test_gold_passes(runner, problem, server):
    verdict = judge_files(runner, problem, server, {})
    assert verdict.passed
    assert verdict.tests_passed == verdict.tests_required == 3


def test_no_edit_fails(runner, problem, server, broken):
    verdict = judge_files(runner, problem, server, broken)
    assert not verdict.passed
    assert verdict.tests_passed == 1
    assert verdict.detail.startswith("failed: AssertionError")


def test_another_right_edit_passes(runner, problem, server, broken):
    other = {PATH: broken[PATH].replace(b"total += 2", b"total = total + 1")}
    assert judge_files(runner, problem, server, other).passed


def test_edit_that_breaks_another_function_fails(runner, problem, server, repository):
    files = {PATH: repository.files[PATH].replace(b"best = word", b"best = text")}
    assert not judge_files(runner, problem, server, files).passed


CHEATS = {
    "edits the tests": lambda broken: {**broken, TESTS: PASSING_TESTS},
    "deletes the tests": lambda broken: {**broken, TESTS: None},
    "adds a conftest": lambda broken: {
        **broken,
        "conftest.py": b"def pytest_runtest_call(item): item.obj = None\n",
        "wordkit/conftest.py": b"raise SystemExit(0)\n",
    },
    "adds runner settings": lambda broken: {
        **broken,
        "pytest.ini": b"[pytest]\naddopts = --collect-only\n",
        "setup.cfg": b"[tool:pytest]\naddopts = -k nothing\n",
        "sitecustomize.py": b"import os; os._exit(0)\n",
    },
    "exits the process on import": lambda broken: with_prefix(broken, "import sys\nsys.exit(0)\n"),
    "exits the process in the call": lambda broken: with_body(broken, "import sys; sys.exit(0)"),
    "ends the process at once": lambda broken: with_body(broken, "import os; os._exit(0)"),
    "ends the process without the word": lambda broken: with_body(
        broken, "import os; getattr(os, '_ex' + 'it')(0)"
    ),
    "kills itself": lambda broken: with_body(broken, "import os; os.kill(os.getpid(), 9)"),
    "skips the test": lambda broken: with_body(broken, "import pytest; pytest.skip('done')"),
    "skips without the word": lambda broken: with_body(
        broken, "import importlib; importlib.import_module('py' + 'test').skip('done')"
    ),
    "skips on import": lambda broken: with_prefix(
        broken,
        "import importlib\n"
        "importlib.import_module('py' + 'test').skip('x', allow_module_level=True)\n",
    ),
    "patches the runner": lambda broken: with_prefix(broken, PATCH_PYTEST),
    "patches unittest": lambda broken: with_prefix(broken, PATCH_ASSERTS),
    "patches the runner without the word": lambda broken: with_prefix(broken, SNEAK_REPORT),
    "makes everything equal": lambda broken: with_body(
        broken, "import builtins; builtins.len = lambda thing: 3"
    ),
    "returns an object that equals all": lambda broken: {
        PATH: broken[PATH].replace(
            b"    return total\n", b"    return type('Any', (), {'__eq__': lambda *a: False})()\n"
        )
    },
    "reads the answer": lambda broken: with_body(
        broken, f"exec(open('/repo/{PATH}').read(), globals())"
    ),
    "runs forever": lambda broken: with_body(broken, "while True: pass"),
    "removes the module": lambda broken: {PATH: None},
    "writes a syntax error": lambda broken: with_prefix(broken, "def (:\n"),
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.sampled(7)
def test_cheater_fails(runner, problem, server, broken, name):
    verdict = judge_files(runner, problem, server, CHEATS[name](broken))
    assert not verdict.passed, verdict
    assert set(verdict.outcomes) == {*problem.fail_to_pass, *problem.pass_to_pass}


def test_gold_passes_after_all_cheaters(runner, problem, server):
    report = runner.run(server.run_again({}, (*problem.fail_to_pass, *problem.pass_to_pass)))
    assert report.passed


def test_forbidden_words_count_only_when_a_file_gains_them(repository):
    text = repository.files[PATH]
    assert find_forbidden({PATH: text + b"\nimport gc, atexit\n"}, repository) == ("atexit", "gc")
    assert find_forbidden({TESTS: b"import pytest\n", PATH: text + b"\n"}, repository) == ()


def test_problem_of_other_sources_is_refused(runner, problem, server):
    other = problem.model_copy(update={"repository_fingerprint": "0" * 16})
    with pytest.raises(GradingError, match="fingerprint 0000"):
        judge_files(runner, other, server, {})


@pytest.fixture(scope="module")
def problem_with_oracle(runner, problem, repository):
    """What the original answers to calls that no test makes."""
    texts = ("one three fifteen", "zz " * 40, "")
    calls = [
        CallRequest(PATH, "count_words", json.dumps({"plain": [text, least], "named": {}}))
        for text in texts
        for least in (1, 4)
    ]

    async def ask():
        async with open_box(repository) as sandbox:
            return await make_calls(sandbox, calls, 0.5)

    held_out = tuple(
        OracleCall(arguments=call.arguments, result=result)
        for call, result in zip(calls, runner.run(ask()), strict=True)
    )
    oracle = FunctionOracle(path=PATH, symbol="count_words", visible=(), held_out=held_out)
    return problem.model_copy(update={"oracle": oracle})


def test_what_only_the_tests_cannot_tell_the_oracle_does(runner, problem_with_oracle, server):
    original = server.repository.files[PATH]
    narrow = original.replace(b"    total = 0\n", b"    total = 0 if len(text) < 100 else 9\n")
    assert narrow != original

    def judged(files, asks_oracle):
        coroutine = judge(
            problem_with_oracle, files, server, time_limit_seconds=120, asks_oracle=asks_oracle
        )
        return runner.run(coroutine)

    assert judged({PATH: narrow}, asks_oracle=False).passed
    verdict = judged({PATH: narrow}, asks_oracle=True)
    assert not verdict.passed
    assert verdict.tests_passed == verdict.tests_required
    assert "4 of 6 held-out calls agree; count_words('zz zz" in verdict.detail
    assert judged({}, asks_oracle=True).passed
