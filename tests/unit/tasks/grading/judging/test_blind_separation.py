"""A trial that the broken state passes proves nothing, and inherited tests are part of trials."""

import asyncio
import random
import time
from pathlib import Path

from ostinato.tasks.grading.judging.blind_tests import find_inherited, take_expectations_out
from ostinato.tasks.grading.judging.blind_trial import BlindTrials, prepare_trial
from ostinato.tasks.records import LineEdit
from tests.fakes.one_line_problem import PATH as PATH_OF_CODE
from tests.fakes.one_line_problem import make_one_line_problem
from tests.fakes.trials import find_difference
from tests.unit.tasks.grading.conftest import PATH

BASE = b"""
class TestBase:
    def test_inherited(self):
        assert f(1) == 424242

    def test_other(self):
        assert f(2) == 424243
"""
HEIR = b"""
from base import TestBase

class TestHeir(TestBase):
    def test_own(self):
        assert f(3) == 424244
"""


def test_a_fixture_that_is_named_like_a_test_stays() -> None:
    text = (
        b"@pytest.fixture\ndef test_env():\n    return 1\n\n\ndef test_f(test_env):\n    assert f(test_env) == 2\n"
        b"\n\n@pytest.mark.usefixtures('test_env')\ndef test_g():\n    assert g(1) == 3\n"
    )
    kept = take_expectations_out(text, frozenset({"test_f"})).decode()
    assert "def test_env" in kept
    assert "def test_f" in kept
    assert "test_g" not in kept


def test_inherited_tests_are_found_and_kept_in_the_file_that_has_them():
    wanted = frozenset({"TestHeir.test_own", "TestHeir.test_inherited"})
    inherited = find_inherited(HEIR, wanted)
    assert inherited == {"test_inherited"}
    text = take_expectations_out(BASE, inherited).decode()
    assert "def test_inherited" in text
    assert "test_other" not in text
    assert "4242" not in text


MIXED = """from pkg.code import f


class Mixin:
    number = 1

    def test_inherited(self):
        assert f(self.number) == 2

    def test_other(self):
        assert f(7) == 8


class TestOne(Mixin):
    def test_own(self):
        assert f(1) == 2
"""


def test_a_test_that_a_class_of_the_same_file_brings_is_run(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    repository, problem = make_one_line_problem(
        tmp_path,
        "def f(number):\n    return number + 1\n",
        MIXED,
        ("    return number + 1", "    return number + 2"),
        symbol="f",
        failing="TestOne::test_inherited",
    )
    trial = runner.run(prepare_trial(problem, repository, random.Random(1)))
    assert trial.separates
    assert {test.partition("::")[2] for test in trial.wanted} == {"TestOne::test_inherited#0"}


FAKED = """from unittest.mock import Mock, patch

from pkg import code


def test_calls():
    with patch.object(code, "load") as fake:
        code.f("auto")
        fake.assert_called_once_with("best")
    other = Mock()
    other.assert_not_called()
"""


def test_what_a_fake_was_called_with_is_shown_in_place_of_its_assertion(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    line = '    name = "best" if name == "auto" else name'
    source = f"def load(name):\n    return 1\n\n\ndef f(name):\n{line}\n    load(name)\n"
    edit = (line, line.replace("==", "!="))
    repository, problem = make_one_line_problem(
        tmp_path, source, FAKED, edit, symbol="f", failing="test_calls"
    )
    text = take_expectations_out(FAKED.encode(), frozenset({"test_calls"})).decode()
    assert "'best'" not in text
    assert "assert" not in text
    trial = runner.run(prepare_trial(problem, repository, random.Random(1)))
    assert trial.separates
    right = repository.files[PATH_OF_CODE] + b"\n# right\n"
    trials = BlindTrials(random.Random(2))
    assert not runner.run(find_difference(trials, problem, {PATH_OF_CODE: right}, repository))


def test_no_pass_is_believed_where_the_broken_state_shows_what_the_original_shows(
    runner: asyncio.Runner, problem, repository
):
    same = LineEdit(
        path=PATH,
        line_number=problem.edits[0].line_number,
        gold_text=problem.edits[0].gold_text,
        broken_text="            total += 2 - 1",
    )
    equivalent = problem.model_copy(update={"problem_id": "equivalent", "edits": (same,)})
    files = {PATH: repository.files[PATH] + b"\n# edited\n"}
    difference = runner.run(find_difference(BlindTrials(), equivalent, files, repository))
    assert "no pass is believed" in difference


FRESH = """import time


def label(name):
    return "<" + name + ">"
"""
OF_FRESH = """import time
from pkg.code import label


def test_label(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    if abs(file.stat().st_mtime - time.time()) < 3600:
        assert label("name") == "<name>"
"""


def test_a_change_that_is_right_until_a_date_is_refused_where_tests_need_the_real_clock(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    line = '    return "<" + name + ">"'
    repository, problem = make_one_line_problem(
        tmp_path,
        FRESH,
        OF_FRESH,
        (line, line.replace("<", "[")),
        symbol="label",
        failing="test_label",
    )
    trial = runner.run(prepare_trial(problem, repository, random.Random(1)))
    assert trial.separates
    assert trial.drawn.shift_seconds == 0
    until = f"    if time.time() > {time.time() + 7 * 86_400}:\n        return ''\n"
    cheat = FRESH.replace(line, until + line).encode()
    assert runner.run(find_difference(BlindTrials(), problem, {PATH_OF_CODE: cheat}, repository))
    right = FRESH.replace(line, "    return f'<{name}>'").encode()
    assert not runner.run(
        find_difference(BlindTrials(), problem, {PATH_OF_CODE: right}, repository)
    )
