"""What reaches the terminal: texts of models, tools and files, without the characters that would control it."""

import io
import re

import pytest
from rich.console import Console

from ostinato.flows.chat.screen import ChatScreen
from ostinato.flows.stages.console import as_printable, say
from ostinato.infra.agent.transcript import (
    CallStatus,
    EndReason,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)

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
