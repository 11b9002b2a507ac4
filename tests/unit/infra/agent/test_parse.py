"""The grammar of calls: what runs, and which error each broken call becomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.agent.dialects.compact.calls import parse_answer
from ostinato.infra.agent.dialects.compact.tools import COMPACT_TOOLS
from ostinato.infra.agent.transcript import CallStatus


def parse_one(text: str):
    (call,) = parse_answer(text, tuple(COMPACT_TOOLS)).calls
    return call


def test_bare_text_is_the_primary_argument() -> None:
    assert parse_one("<read_file>a.py::f</read_file>").arguments == {"path": "a.py::f"}
    assert parse_one("<run_terminal> pytest </run_terminal>").arguments == {"command": "pytest"}


def test_line_edits_keep_their_white_space() -> None:
    call = parse_one("<edit_file><path>a.py</path><L2>    x = 1\n<L3></edit_file>")
    assert call.arguments == {"path": "a.py", "lines": "<L2>    x = 1\n<L3>"}
    assert call.status is CallStatus.OK


def test_tagged_arguments_may_hold_anything_but_their_own_closing_tag() -> None:
    call = parse_one("<edit_file>\n<path>a.py</path><old> a <b> c </old><new></new></edit_file>")
    assert call.arguments == {"path": "a.py", "old": " a <b> c ", "new": ""}
    assert call.status is CallStatus.OK


def test_several_calls_keep_their_order_and_leave_the_prose() -> None:
    answer = parse_answer(
        "Look: <read_file>a.py</read_file> and <run_terminal>ls</run_terminal> now",
        tuple(COMPACT_TOOLS),
    )
    assert [call.tool for call in answer.calls] == ["read_file", "run_terminal"]
    assert answer.prose == "Look:  and  now"


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [
        ("<read_file>a.py", CallStatus.MALFORMED, "</read_file>"),
        ("a.py</read_file>", CallStatus.MALFORMED, "<read_file>"),
        ("<edit_file><path>a.py</edit_file>", CallStatus.MALFORMED, "</path>"),
        ("<delete_all>x</delete_all>", CallStatus.UNKNOWN_TOOL, "read_file"),
        ("<read_file></read_file>", CallStatus.INVALID_ARGUMENTS, "path is missing"),
        ("<edit_file></edit_file>", CallStatus.INVALID_ARGUMENTS, "wanted"),
        (
            "<edit_file><old>a</old><new>b</new></edit_file>",
            CallStatus.INVALID_ARGUMENTS,
            "path is missing",
        ),
        (
            "<grep><path>a</path><path>b</path>x</grep>",
            CallStatus.INVALID_ARGUMENTS,
            "path is given twice",
        ),
        (
            "<read_file><path>a</path>b</read_file>",
            CallStatus.INVALID_ARGUMENTS,
            "text after path",
        ),
    ],
)
def test_broken_calls_say_what_is_wrong(text: str, status: CallStatus, word: str) -> None:
    call = parse_one(text)
    assert call.status is status
    assert word in call.error


def test_disabled_tools_are_unknown() -> None:
    (call,) = parse_answer("<ask_user>Why?</ask_user>", ("read_file",)).calls
    assert call.status is CallStatus.UNKNOWN_TOOL


def test_prose_with_angle_brackets_is_a_final_answer() -> None:
    answer = parse_answer("Use a < b and list<int> or <thing>.", tuple(COMPACT_TOOLS))
    assert answer.calls == ()


@given(st.lists(st.sampled_from(["<", ">", "</", "read_file", "path", "edit_file", "<L1>", "x"])))
def test_no_text_raises(pieces: list[str]) -> None:
    parse_answer("".join(pieces), tuple(COMPACT_TOOLS))
