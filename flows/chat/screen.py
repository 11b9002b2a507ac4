"""Terminal output of `ostinato chat`: calls with their outcome, diffs, questions."""

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from ostinato.flows.stages.console import as_printable
from ostinato.infra.agent.transcript import (
    CallStatus,
    EndReason,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)

MAX_RESULT_LINES = 8
MAX_LINE_CHARACTERS = 110
MAX_DIFF_LINES = 400
ENDINGS = {
    EndReason.TURN_LIMIT: "stopped: no turns left",
    EndReason.TOKEN_LIMIT: "stopped: no tokens left",
    EndReason.BROKEN_CALLS: "stopped: the model repeats calls that cannot run",
    EndReason.TIMED_OUT: "stopped: out of time",
    EndReason.BOX_RUINED: "stopped: a command ended the sandbox",
    EndReason.HARNESS_FAILED: "stopped: the harness failed",
    EndReason.FAULT: "stopped by a fault of this program",
    EndReason.SANDBOX_FAILED: "the sandbox failed",
    EndReason.ENGINE_FAILED: "the model could not answer",
}


class ChatScreen:
    """Output and input of a chat on the terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def show_opening(self, root: str, model: str, dialect: str, num_files: int, tests: str) -> None:
        """Prints the opened repository, model and tools."""
        self.say(f"model       {model}")
        self.say(f"repository  {root} ({num_files} files, copied into a sandbox)")
        self.say(f"tools       {dialect} dialect; tests: {tests}")
        self.say("Your files stay unchanged until you agree. /help lists the commands.")

    def show_turn(self, turn: TurnRecord) -> None:
        """Prints each call of a turn with its outcome."""
        if turn.is_summary:
            self.say("context full: the model continues from its own summary", "dim")
            return
        if not turn.calls:
            return
        for call, result in zip(turn.calls, turn.results, strict=True):
            mark, style = ("●", "green") if call.status is CallStatus.OK else ("✗", "red")
            line = Text(f"{mark} ", style=style)
            line.append(as_printable(call.tool or "call"), style="bold")
            line.append(as_printable(f" {_short(describe_arguments(call))}"))
            if call.status is not CallStatus.OK:
                line.append(f"  {call.status.value}", style="red")
            self.console.print(line, highlight=False)
            self._show_result(call, result)

    def show_ending(self, transcript: Transcript) -> None:
        """Prints the final message, or the reason why there is none."""
        ending = ENDINGS.get(transcript.end_reason)
        if ending is not None:
            detail = f" ({transcript.detail})" if transcript.detail else ""
            self.say(f"{ending}{detail}", "yellow")
        if transcript.final_message:
            self.say(transcript.final_message, "bold")
        tokens = sum(turn.generated_tokens for turn in transcript.turns)
        calls = sum(len(turn.calls) for turn in transcript.turns)
        self.say(
            f"{len(transcript.turns)} turns, {calls} calls, {tokens} tokens, "
            f"{transcript.wall_seconds:.1f} s",
            "dim",
        )

    def show_diff(self, diff: str) -> None:
        """Prints a unified diff in colour."""
        lines = as_printable(diff.removesuffix("\n")).split("\n")
        shown = "\n".join(lines[:MAX_DIFF_LINES])
        if self.console.is_terminal:
            self.console.print(Syntax(shown, "diff", background_color="default", word_wrap=True))
        else:
            self.console.print(shown, markup=False, highlight=False, soft_wrap=True)
        if len(lines) > MAX_DIFF_LINES:
            self.say(f"[{len(lines) - MAX_DIFF_LINES} more lines]", "dim")

    def say(self, text: str, style: str = "") -> None:
        """Prints a plain line."""
        text = as_printable(text)
        self.console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def ask(self, question: str) -> str:
        """A line from the person. EOFError at the end of the input."""
        return self.console.input(Text(as_printable(question), style="bold cyan")).strip()

    def _show_result(self, call: ToolCallRecord, result: str) -> None:
        lines = result.split("\n")
        if call.call_id and lines and lines[0].startswith("["):
            lines = lines[1:]  # the header repeats the status that the mark shows
        for line in lines[:MAX_RESULT_LINES]:
            self.say(f"    {_short(line)}", "dim")
        if len(lines) > MAX_RESULT_LINES:
            self.say(f"    ({len(lines) - MAX_RESULT_LINES} more lines)", "dim")


def describe_arguments(call: ToolCallRecord) -> str:
    """A call's arguments on one line."""
    shown = [
        value if name in ("path", "command", "query", "pattern") else f"{name}={value!r}"
        for name, value in call.arguments.items()
    ]
    return " ".join(shown)


def _short(text: str) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= MAX_LINE_CHARACTERS else text[: MAX_LINE_CHARACTERS - 1] + "…"
