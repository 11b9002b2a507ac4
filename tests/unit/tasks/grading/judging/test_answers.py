"""Right places and honest messages pass; guesses, claims, thoughts and changed files fail."""

import pytest

from ostinato.infra.agent.transcript import EndReason, TurnRecord
from ostinato.tasks.grading.change import AttemptChange
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import grade
from ostinato.tasks.grading.judging.answers import find_claim, judge_reply, read_places
from ostinato.tasks.records import CodePlace, Problem, WantedReply
from tests.fakes.transcripts import transcript_of
from tests.unit.tasks.grading.conftest import PATH, TESTS

FILES = dict.fromkeys(("pkg/a.py", "pkg/b.py", "pkg/sub/b.py", "pkg/__init__.py"), b"")
ONE = CodePlace(path=PATH, first_line=10, last_line=12)
OTHER = CodePlace(path="wordkit/shaping.py", first_line=3, last_line=3)


@pytest.mark.parametrize(
    ("message", "places"),
    [
        ("pkg/a.py:12", "pkg/a.py:12"),
        ("It is `pkg/a.py` line 12.", "pkg/a.py:12"),
        ("**pkg/a.py**: lines 12\u201314", "pkg/a.py:12-14"),
        ("[a.py:12](pkg/a.py#L12-L14)", "pkg/a.py:12 pkg/a.py:12-14"),
        ('File "/repo/pkg/a.py", line 12, in f', "pkg/a.py:12"),
        ("./pkg/a.py:12:5: ValueError", "pkg/a.py:12"),
        ("L12-L14 of pkg/a.py", "pkg/a.py:12-14"),
        ("line 12 (pkg/a.py)", "pkg/a.py:12"),
        ("| `pkg/a.py` | 12 |", "pkg/a.py:12"),
        ("pkg/a.py:12, 13, lines 14 to 15 or 20", "pkg/a.py:12 13 14-15 20"),
        ("lines 12 and 15 of the file `pkg/a.py`", "pkg/a.py:12 15"),
        ("In shop.parse of pkg/a.py the check, e.g. in line 12", "pkg/a.py:12"),
        ("pkg/a.py:12-14; pkg/sub/b.py:3", "pkg/a.py:12-14 pkg/sub/b.py:3"),
        ("sub/b.py:3", "pkg/sub/b.py:3"),
        ("https://host/blob/main/pkg/a.py#L12", "pkg/a.py:12"),
        ("b.py:3", "b.py:3"),  # two files have this name
        ("pkg/a.py::test_x and Python 3.11", ""),
        ("pkg/a.py:1234567", ""),
    ],
)
def test_places_are_read_in_every_notation(message: str, places: str) -> None:
    wanted: list[str] = []
    for word in places.split():
        path = word.rpartition(":")[0] or wanted[-1].rpartition(":")[0]
        wanted.append(f"{path}:{word.rpartition(':')[2]}")
    assert [str(place) for place in read_places(message, FILES)] == wanted


def asking(problem: Problem, *places: CodePlace, needs_all: bool = False) -> Problem:
    reply = WantedReply(places=places, needs_all=needs_all)
    return problem.model_copy(update={"edits": (), "fail_to_pass": (), "reply": reply})


def judge(problem, repository, message, changed=None, **fields):
    change = AttemptChange.of(problem, changed or {}, repository)
    return judge_reply(problem, change, transcript_of((), message=message, **fields))


RIGHT = f"{PATH}:11"
WRONG = {
    "no message": "",
    "no place": "It is in count_words.",
    "only the file": f"See {PATH}.",
    "another line": f"{PATH}:30",
    "another file": "wordkit/shaping.py:11",
    "right and wrong": f"{PATH}:11 or {PATH}:30",
    "right, and a wrong line after it": f"{PATH}:11. Or is it line 30?",
    "every line": " ".join(f"{PATH}:{number}" for number in range(1, 29)),
    "the whole file": f"{PATH}:1-28",
    "two lines more": f"{PATH}:8-12",
    "too long": f"{PATH}:11 {'x' * 20_000}",
    "a thought": f"<think>{RIGHT}</think>",
    "a thought that never ends": f"<think>{RIGHT}",
    "a thought without its opening": f"{RIGHT}</think> I do not know.",
}


@pytest.mark.parametrize(
    "message", [RIGHT, f"{PATH}:12", f"{PATH}:9-12", f"<think>{PATH}:30</think>{RIGHT}"]
)
def test_a_right_place_passes(problem, repository, message) -> None:
    verdict = judge(asking(problem, ONE), repository, message)
    assert verdict.passed
    assert f"accepted: {ONE}" in verdict.detail


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_fails_and_the_operator_reads_the_right_one(
    problem, repository, name
) -> None:
    verdict = judge(asking(problem, ONE), repository, WRONG[name])
    assert not verdict.passed
    assert f"accepted: {ONE}" in verdict.detail


@pytest.mark.parametrize(("needs_all", "one_passes"), [(False, True), (True, False)])
def test_a_set_of_places_wants_all_of_them(problem, repository, needs_all, one_passes) -> None:
    asked = asking(problem, ONE, OTHER, needs_all=needs_all)
    assert judge(asked, repository, f"{RIGHT} and {OTHER}").passed
    assert judge(asked, repository, RIGHT).passed is one_passes


CHANGES = {
    "code": {PATH: b"x = 1\n"},
    "removed code": {PATH: None},
    "new code": {"wordkit/new.py": b""},
    "a test": {TESTS: b""},
    "a new test": {"tests/test_new.py": b""},
    "settings of the runner": {"conftest.py": b""},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("places", [(ONE,), ()])
def test_a_changed_file_fails_the_right_message(problem, repository, name, places) -> None:
    message = RIGHT if places else "Nothing is wrong."
    asked = asking(problem, *places)
    assert judge(asked, repository, message).passed
    assert judge(asked, repository, message, {"notes.txt": b"left by a command"}).passed
    assert "changed" in judge(asked, repository, message, CHANGES[name]).detail
    assert not judge(asked, repository, message, CHANGES[name]).passed


@pytest.mark.parametrize("end", [EndReason.TURN_LIMIT, EndReason.BROKEN_CALLS, EndReason.TIMED_OUT])
def test_an_attempt_that_did_not_finish_has_no_message(problem, repository, end) -> None:
    assert not judge(asking(problem, ONE), repository, RIGHT, end=end).passed


def test_a_thought_that_the_prompt_opened_is_no_message(problem, repository) -> None:
    asked = asking(problem, ONE)
    change = AttemptChange.of(asked, {}, repository)
    turn = TurnRecord(generated_tokens=1, text=RIGHT, calls=(), begins_in_thought=True)
    assert not judge_reply(asked, change, transcript_of([turn], message=RIGHT)).passed
    ended = f"{PATH}:30</think>{RIGHT}"
    assert judge_reply(asked, change, transcript_of([turn], message=ended)).passed


@pytest.mark.parametrize(
    "message",
    [
        "Nothing is wrong; all tests pass.",
        "I investigated the reported bug. It works as expected.",
        "I couldn't find the bug; no change was made.",
        "I changed nothing.",
        "count_words is not broken. Which input fails for you?",
    ],
)
def test_that_nothing_is_wrong_is_said_in_many_ways(problem, repository, message) -> None:
    assert judge(asking(problem), repository, message).passed


@pytest.mark.parametrize(
    "message",
    [
        "I fixed the bug.",
        "Fixed.",
        "There is a bug in line 3.",
        "Nothing fails. The bug is in count_words.",
        "I've changed the loop",
        "count_words is broken",
        "<think>Nothing is wrong.</think>",
        "",
    ],
)
def test_claims_of_a_fix_or_a_bug_fail(problem, repository, message) -> None:
    assert not judge(asking(problem), repository, message).passed
    assert message.startswith("<") or not message or find_claim(message)


async def test_the_reward_of_an_answer_charges_no_missing_edit(problem, repository, server) -> None:
    config = GradingConfig(flagged=0.1, communication=0.1, unverified=0.1)
    for asked, message in ((asking(problem, ONE), RIGHT), (asking(problem), "All tests pass.")):
        turn = TurnRecord(generated_tokens=5, text=message, calls=())
        verdict, reward = await grade(
            asked,
            asked.break_files(repository.files),
            transcript_of([turn], message=message),
            server,
            config,
        )
        assert verdict.passed
        charges = {name: term for name, term in reward.terms.items() if term and name != "length"}
        assert charges in ({"correctness": 1.0}, {"correctness": 1.0, "communication": -0.1})
        assert reward.flags == {}
