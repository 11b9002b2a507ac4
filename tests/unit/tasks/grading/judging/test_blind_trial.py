"""Tests lose their expectations, values are compared strictly, faults are failed verdicts."""

import asyncio
import random

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, SandboxLost
from ostinato.tasks.grading import grade as grade_module
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import grade
from ostinato.tasks.grading.judging.blind_tests import change_value, take_expectations_out
from ostinato.tasks.grading.judging.blind_trial import Differences, agrees, keep_stable
from ostinato.tasks.grading.judging.drawn_calls import is_same
from tests.unit.tasks.grading.conftest import PATH

SOURCE = b"""
import pytest

class TestIt:
    def test_kept(self):
        expected = 7
        assert f(1, "secret-in") == 424242, "message"
        assert not g(3) and h(2) >= [99, 98]
        self.assertEqual(f(2), 424243)
        with pytest.raises(ValueError, match="424244"):
            f(-1)

    def test_dropped(self):
        assert f(5) == 424245
"""


def test_expectations_are_taken_out_and_inputs_stay():
    text = take_expectations_out(SOURCE, frozenset({"TestIt.test_kept"})).decode()
    assert "4242" not in text
    assert "99" not in text
    assert "secret-in" in text
    assert "assert" not in text
    assert "test_dropped" not in text
    assert text.count("__observe__") == 3
    assert "__catch__(True)" in text


def test_changed_copy_has_other_literals_and_the_same_tests():
    tests = frozenset({"TestIt.test_kept"})
    plain = take_expectations_out(SOURCE, tests)
    copies = {take_expectations_out(SOURCE, tests, random.Random(seed)) for seed in range(8)}
    assert len(copies - {plain}) >= 6
    assert all(b"def test_kept" in copy for copy in copies)


@pytest.mark.parametrize("value", [3, 10**6, 1.5, "some text", b"bytes", True, None])
def test_changed_value_keeps_its_type(value):
    chance = random.Random(0)
    assert {type(change_value(value, chance)) for _ in range(50)} == {type(value)}


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ({"values": [1]}, {"values": [1]}, True),
        ({"values": [1]}, {"values": [True]}, False),
        ({"values": [1]}, {"values": ["1"]}, False),
        ({"list": [1]}, {"tuple": [1]}, False),
        ({"float": (0.1 + 0.2).hex()}, {"float": (0.3).hex()}, True),
        ({"float": (0.1).hex()}, {"float": (0.2).hex()}, False),
        ({"float": "nan"}, {"float": "nan"}, True),
        ({"float": []}, {"float": "0x1p0"}, False),
    ],
)
def test_values_are_compared_by_type_and_content(one, two, same):
    assert is_same(one, two) is same


def test_change_shows_all_that_the_original_shows():
    wanted = [{"values": [1]}, None, {"ended": ""}]
    assert agrees([{"values": [1]}, {"values": [5]}, {"ended": ""}], wanted)
    assert not agrees([{"values": [1]}], wanted)
    assert not agrees([], wanted)


def test_what_differs_between_runs_and_follows_an_exception_is_not_held_against_a_change():
    first = [{"values": [1]}, {"values": [2]}, {"ended": "ValueError"}]
    second = [{"values": [1]}, {"values": [3]}, {"ended": "ValueError"}]
    assert keep_stable(first, second) == [{"values": [1]}, None]
    assert keep_stable([{"values": [1]}, {"ended": "CallTimeout"}], first) == []


def test_two_clocks_that_agree_by_chance_are_no_behaviour() -> None:
    def times(*microseconds: int) -> list[object]:
        told = [{"type": "timedelta", "text": f"microseconds={it}"} for it in microseconds]
        return [{"values": [one, len(microseconds)]} for one in told] + [{"values": [7]}]

    assert keep_stable(times(343, 390), times(343, 401)) == [None, None, {"values": [7]}]
    assert keep_stable(times(343, 390), times(343, 390)) == times(343, 390)


class Broken:
    """Trials in which everything goes wrong in the same way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def judge(self, *_: object) -> Differences:
        raise self.error


FAULTS = [
    RecursionError("deep"),
    UnicodeEncodeError("utf-8", "\udcff", 0, 1, "no"),
    SandboxLost("x"),
]


class LostOnce:
    """Trials whose box is lost the first time, as when something outside ends it."""

    def __init__(self) -> None:
        self.tries = 0

    async def judge(self, *_: object) -> Differences:
        self.tries += 1
        if self.tries == 1:
            raise SandboxLost("box ended with code -9")
        return Differences()


def test_a_box_that_is_lost_once_is_not_the_attempts_fault(
    runner: asyncio.Runner, problem, server, make_transcript, monkeypatch: pytest.MonkeyPatch
):
    second_runners: list[bool] = []
    judge = grade_module.judge

    async def seen(*arguments, second_runner: bool, **options):
        second_runners.append(second_runner)
        return await judge(*arguments, second_runner=second_runner, **options)

    monkeypatch.setattr(grade_module, "judge", seen)
    trials = LostOnce()
    config = GradingConfig(second_runner_share=0.0)
    verdict, _ = runner.run(grade(problem, {}, make_transcript(), server, config, trials))
    assert trials.tries == 2
    assert second_runners == [False, True]  # to end a box is no way around the second runner
    assert verdict.tampering == ()


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_fault_while_grading_is_a_failed_verdict_with_a_flag(
    runner: asyncio.Runner, problem, server, make_transcript, error
):
    config = GradingConfig()
    trials = Broken(error)
    verdict, reward = runner.run(grade(problem, {}, make_transcript(), server, config, trials))
    assert not verdict.passed
    assert verdict.tampering == (f"fault while grading: {type(error).__name__}",)
    assert reward.values["correctness"] == 0.0
    assert "run_tampering" in reward.flags


def test_machine_without_room_is_no_verdict(runner, problem, server, make_transcript):
    trials = Broken(CapacityExhausted("no room"))
    with pytest.raises(CapacityExhausted):
        runner.run(grade(problem, {}, make_transcript(), server, GradingConfig(), trials))


ODD_FILES = {
    "a name that is no text": {"note\udcff": b"x", "wordkit/note\udcff.py": b"x = 1\n"},
    "a name with a line break": {"wordkit/a\nb.py": b"x = 1\n"},
    "a sum of 3,000 texts": {PATH: b"x = (" + b" + ".join([b"'a'"] * 3000) + b")\n"},
    "bytes that are no text": {PATH: bytes(range(256)) * 4},
    "a thousand brackets": {PATH: b"x = " + b"(" * 1000 + b")" * 1000 + b"\n"},
    "half of a pair": {PATH: b"raise ValueError('\\ud800')\n"},
}


@pytest.mark.parametrize("name", ODD_FILES)
@pytest.mark.sampled(3)
def test_odd_files_end_in_a_verdict(runner, problem, server, make_transcript, name):
    files = {**problem.break_files(server.repository.files), **ODD_FILES[name]}
    verdict, _ = runner.run(grade(problem, files, make_transcript(), server, GradingConfig()))
    assert not verdict.passed
    assert verdict.model_dump_json()
