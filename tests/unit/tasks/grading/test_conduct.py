import pytest

from ostinato.infra.agent.transcript import CallStatus, EndReason
from ostinato.tasks.grading.conduct import (
    count_questions,
    find_message_faults,
    is_verified,
    last_todos,
)
from tests.unit.tasks.grading.test_rewards import BAD, OK, call, transcript_of


@pytest.mark.parametrize(
    ("calls", "verified"),
    [
        ([], True),
        ([("edit_file", OK)], False),
        ([("edit_file", OK), ("run_terminal", OK)], True),
        ([("run_terminal", OK), ("edit_file", OK)], False),
        ([("edit_file", BAD)], True),
    ],
)
def test_verification_means_a_command_after_the_last_edit(make_transcript, calls, verified):
    assert is_verified(make_transcript(*calls)) is verified


def count_open(*calls):
    return sum(item.is_open for item in last_todos(transcript_of(*calls)))


def test_last_list_counts_and_merging_changes_single_items():
    first = call("todo_write", items="[ ] read\n[~] fix it\n[ ] test", merge="false")
    ticked = call("todo_write", items="[x] fix it", merge="true")
    assert count_open(first) == 3
    assert count_open(first, ticked) == 2
    assert count_open(first, call("todo_write", items="[x] all")) == 0
    assert count_open(call("todo_write", BAD, items="[ ] a")) == 0


def test_plain_lists_are_open_until_they_say_done():
    items = last_todos(transcript_of(call("todo_write", text="1. read the file: done\n2. fix")))
    assert [item.is_open for item in items] == [False, True]


def test_refused_questions_are_not_questions():
    asked = transcript_of(call("ask_user", text="a"), call("ask_user", BAD, text="b"))
    assert count_questions(asked) == 1


@pytest.mark.parametrize(
    ("message", "passed", "faults"),
    [
        ("Fixed.", True, ()),
        ("Fixed.", False, ("false_claim",)),
        ("Could not fix it.", False, ()),
        ("The bug isn't fixed.", False, ()),
        ("All tests pass now.", True, ("unsupported_claim",)),
        ("", True, ("no_message",)),
        ("x" * 300, True, ("too_long",)),
    ],
)
def test_closing_message_faults(message, passed, faults):
    transcript = transcript_of(call("edit_file"), message=message)
    found = find_message_faults(transcript, passed=passed, has_edit=True, limit_characters=200)
    assert found == faults


def test_attempt_cut_off_has_no_closing_message():
    cut = transcript_of(call("grep", CallStatus.OK), end=EndReason.TURN_LIMIT)
    found = find_message_faults(cut, passed=False, has_edit=False, limit_characters=200)
    assert found == ("no_message",)
