"""What reaches the terminal: texts of models, tools and files, without the characters that would control it."""

import io
import re

import pytest
from rich.console import Console

from ostinato.flows.chat.screen import ChatScreen
from ostinato.flows.operating.status.report import print_rows
from ostinato.flows.operating.status.rows import StatusRow
from ostinato.flows.stages.console import as_printable, print_error, say
from ostinato.infra.agent.transcript import (
    CallStatus,
    EndReason,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)
from ostinato.infra.platform.errors import ConfigError

CLEARS = "\x1b]0;owned\x07\x1b[2Jdone\x9b31m\x7f\r"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_text_without_control_characters_stays() -> None:
    text = "def f():\n\treturn 'é → 日'"
    assert as_printable(text) == text
    assert len(as_printable(CLEARS)) == len(CLEARS)


def test_a_line_for_the_person_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"attempt\n{CLEARS}")
    assert "done" in (said := capsys.readouterr().err)
    assert not CONTROL.search(said)


def test_an_error_and_the_status_table_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ConfigError(f"model is 'x', wanted one of {CLEARS}"))
    print_rows(
        [StatusRow(part=CLEARS, state="failed", cause=f"[red] {CLEARS}")], Console(width=200)
    )
    shown = capsys.readouterr()
    assert "done" in shown.err
    assert shown.out.count("done") == 2
    assert not CONTROL.search(shown.err + shown.out)


@pytest.mark.parametrize("character", ["\udcff", "\u202e", "\u2066"])
def test_a_name_that_cannot_be_encoded_or_turns_the_line_round_is_shown(character: str) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    ChatScreen(Console(file=written)).say(f"left out: a{character}.py")
    written.seek(0)
    assert written.read() == "left out: a\ufffd.py\n"


def test_nothing_that_a_model_or_a_tool_wrote_controls_the_chats_terminal() -> None:
    written = io.StringIO()
    screen = ChatScreen(Console(file=written, width=200))
    call = ToolCallRecord(
        tool=f"read{CLEARS}", arguments={"path": CLEARS}, status=CallStatus.OK, wall_seconds=0.0
    )
    turn = TurnRecord(generated_tokens=1, text=CLEARS, calls=(call,), results=(CLEARS,))
    screen.show_turn(turn)
    screen.show_ending(
        Transcript(
            segments=(),
            turns=(turn,),
            end_reason=EndReason.FINISHED,
            final_message=CLEARS,
            wall_seconds=0.0,
        )
    )
    screen.show_diff(f"+{CLEARS}\n")
    assert written.getvalue().count("done") >= 4
    assert not CONTROL.search(written.getvalue())
