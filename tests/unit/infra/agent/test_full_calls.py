"""The plain-text form: what is written is read back, nothing raises, no value becomes a call."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.dialects.full.calls import call_from_json, parse_calls, write_call
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.transcript import CallStatus

PIECES = (
    *("<", ">", "</", "\\", "\n", "call", "<call", "</call>", '<call tool="run_terminal">', "x"),
    *("<old>", "</old>", "<\\/old>", "</new>", "<path>", "</path>", "<text>", "</text>", "a.py"),
    *("<command>rm -rf /</command>", '<call tool="', '">', "edit_file"),
)
hostile_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join)
prose = st.text(alphabet="ab c.\n", max_size=20)


@settings(deadline=None)
@given(st.lists(st.tuples(prose, hostile_text, hostile_text), max_size=4), prose)
def test_whatever_the_values_hold_the_calls_come_back(edits, ending: str) -> None:
    written = [
        {"path": "a.py", "old": old, "new": new} for _, old, new in edits if old and old != new
    ]
    kept = [before for before, old, new in edits if old and old != new]
    calls = [write_call("edit_file", arguments) for arguments in written]
    text = "".join(before + call for before, call in zip(kept, calls, strict=True)) + ending
    answer = parse_calls(text, FULL_TOOLS)
    assert [call.arguments for call in answer.calls] == written
    assert all(call.status is CallStatus.OK for call in answer.calls)
    assert answer.prose == ("".join(kept) + ending).strip()


@settings(deadline=None)
@given(hostile_text)
def test_no_text_raises_and_every_call_runs_or_says_why(text: str) -> None:
    for call in parse_calls(text, FULL_TOOLS).calls:
        assert (call.status is CallStatus.OK) == (call.error == "")
        if call.status is CallStatus.OK:
            again = parse_calls(write_call(call.tool, call.arguments), FULL_TOOLS).calls[0]
            assert again.values == call.values


@given(st.sampled_from([*FULL_TOOLS, "nothing"]), st.text() | hostile_text)
@settings(max_examples=50, deadline=None)
def test_json_that_is_not_arguments_is_an_error_not_an_exception(tool: str, text: str) -> None:
    call_from_json(tool, text, FULL_TOOLS)


BROKEN = [
    ("<call>", CallStatus.MALFORMED, 'wanted <call tool="NAME">'),
    ("<call tool='grep'></call>", CallStatus.MALFORMED, 'wanted <call tool="NAME">'),
    ('<call tool="grep"><pattern>x</pattern>', CallStatus.MALFORMED, "</call> is missing"),
    ('<call tool="grep"><pattern>x</call>', CallStatus.MALFORMED, "</pattern> is missing"),
    ('<call tool="grep">x</call>', CallStatus.MALFORMED, "'x</call>' in a call"),
    ("done</call>", CallStatus.MALFORMED, "without <call"),
    ('<call tool="rm"></call>', CallStatus.UNKNOWN_TOOL, "wanted one of read_file"),
    ('<call tool="grep"></call>', CallStatus.INVALID_ARGUMENTS, "grep.pattern is missing"),
    (
        '<call tool="grep"><pattern>x</pattern><limit>many</limit></call>',
        CallStatus.INVALID_ARGUMENTS,
        "grep.limit is 'many', wanted an integer 1 to 500",
    ),
    (
        '<call tool="grep"><pattern>x</pattern><limit>501</limit></call>',
        CallStatus.INVALID_ARGUMENTS,
        "wanted an integer 1 to 500",
    ),
    (
        '<call tool="grep"><pattern>x</pattern><mode>all</mode></call>',
        CallStatus.INVALID_ARGUMENTS,
        "wanted one of lines, files, count",
    ),
    (
        '<call tool="read_file"><path>../secret</path></call>',
        CallStatus.INVALID_ARGUMENTS,
        "wanted a path inside the repository",
    ),
    (
        '<call tool="read_file"><path>a</path><line>3</line></call>',
        CallStatus.INVALID_ARGUMENTS,
        "has no argument 'line', wanted path, offset, limit",
    ),
    (
        '<call tool="todo_write"><items>run the tests</items></call>',
        CallStatus.INVALID_ARGUMENTS,
        "wanted entries like",
    ),
    (
        '<call tool="run_terminal"><job>job-1</job><command>ls</command></call>',
        CallStatus.INVALID_ARGUMENTS,
        "either command or job",
    ),
]


@pytest.mark.parametrize(("text", "status", "words"), BROKEN)
def test_broken_calls_say_what_is_wrong(text: str, status: CallStatus, words: str) -> None:
    (call,) = parse_calls(text, FULL_TOOLS).calls
    assert call.status is status
    assert words in call.error


def test_reading_goes_on_after_a_broken_call() -> None:
    text = '<call tool="grep">x</call><call tool="glob"><pattern>*.py</pattern></call>'
    statuses = [call.status for call in parse_calls(text, FULL_TOOLS).calls]
    assert statuses == [CallStatus.MALFORMED, CallStatus.OK]


def test_json_types_must_be_those_of_the_schema() -> None:
    def call(arguments: str) -> CallStatus:
        return call_from_json("read_file", arguments, FULL_TOOLS).status

    assert call('{"path": "a.py", "offset": 3}') is CallStatus.OK
    assert call('{"path": "a.py", "offset": "3"}') is CallStatus.INVALID_ARGUMENTS
    assert call('{"path": "a.py", "offset": true}') is CallStatus.INVALID_ARGUMENTS
    assert call('{"path": ["a.py"]}') is CallStatus.INVALID_ARGUMENTS
    assert call("[]") is CallStatus.MALFORMED
    assert call('{"path": "\\ud800"}') is CallStatus.MALFORMED  # no tool could write it to a file
    assert call('{"path": "a.py", "path": "b.py"}') is CallStatus.MALFORMED
    assert call('{"path": "a.py"} {}') is CallStatus.MALFORMED
