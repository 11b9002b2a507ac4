"""Conduct of an attempt, apart from its result: broken calls, questions, to-do items, checks, closing message."""

import re
from dataclasses import dataclass

from ostinato.infra.agent.dialects.full.tools import EDIT_TOOLS
from ostinato.infra.agent.tools.names import ASK_USER, RUN_TERMINAL, TODO_WRITE
from ostinato.infra.agent.transcript import (
    MODEL_FAULTS,
    CallStatus,
    EndReason,
    ToolCallRecord,
    Transcript,
)

_MARKED = re.compile(r"^\W*\[(?P<mark>.)\]\s*(?P<text>.*)$")
_DONE_WORD = re.compile(r"\b(done|finished|completed?|ok)\W*$|^\W*(done|finished)\b", re.I)
_CLAIM = re.compile(
    r"\b(fixed|solved|resolved|tests? (?:now )?pass(?:es|ed)?|all (?:tests )?pass(?:ed|ing)?)\b",
    re.I,
)
_DENIAL = re.compile(r"n't\b|\b(not|cannot|unable|fail(?:s|ed|ing)?|unsure)\b", re.I)
_TEST_CLAIM = re.compile(r"\btests?\b[^.]{0,40}\bpass", re.I)


@dataclass(frozen=True, slots=True)
class TodoItem:
    """One item of the final to-do list."""

    text: str
    is_open: bool


def all_calls(transcript: Transcript) -> list[ToolCallRecord]:
    """All calls of all turns, in order."""
    return [call for turn in transcript.turns for call in turn.calls]


def count_broken_calls(transcript: Transcript) -> int:
    """Calls that the harness could not run as written."""
    return sum(call.status in MODEL_FAULTS for call in all_calls(transcript))


def count_questions(transcript: Transcript) -> int:
    """Questions to the user, answered or not."""
    return sum(
        call.tool == ASK_USER and call.status not in MODEL_FAULTS for call in all_calls(transcript)
    )


def is_verified(transcript: Transcript) -> bool:
    """Whether a command ran in or after the turn of the last edit. True when nothing was edited."""
    verified = True
    for call in all_calls(transcript):
        if call.tool in EDIT_TOOLS and call.status is CallStatus.OK:
            verified = False
        elif call.tool == RUN_TERMINAL:
            verified = True
    return verified


def last_todos(transcript: Transcript) -> tuple[TodoItem, ...]:
    """Items of the final to-do list, one per line. Marks `[x]`, `[-]` and a check mark are done, others open."""
    items: dict[str, TodoItem] = {}
    for call in all_calls(transcript):
        if call.tool != TODO_WRITE or call.status is not CallStatus.OK:
            continue
        text = call.arguments.get("items") or call.arguments.get("text") or ""
        if call.arguments.get("merge", "").strip() != "true":
            items = {}
        for line in text.split("\n"):
            if line.strip():
                item = _read_todo(line)
                items[item.text.lower()] = item
    return tuple(items.values())


def find_message_faults(
    transcript: Transcript, *, passed: bool, has_edit: bool, limit_characters: int
) -> tuple[str, ...]:
    """Faults of the closing message, by name."""
    message = transcript.final_message.strip()
    if transcript.end_reason is not EndReason.FINISHED or not message:
        return ("no_message",)
    faults: list[str] = []
    if len(message) > limit_characters:
        faults.append("too_long")
    claims = _CLAIM.search(message) is not None and _DENIAL.search(message) is None
    if claims and not (passed and has_edit):
        faults.append("false_claim")
    ran_command = any(call.tool == RUN_TERMINAL for call in all_calls(transcript))
    if claims and _TEST_CLAIM.search(message) and not ran_command:
        faults.append("unsupported_claim")
    return tuple(faults)


def _read_todo(line: str) -> TodoItem:
    marked = _MARKED.match(line.strip())
    if marked is not None:
        return TodoItem(marked["text"].strip(), marked["mark"].lower() not in ("x", "\u2713", "-"))
    text = line.strip().lstrip("-*0123456789. ")
    return TodoItem(text, _DONE_WORD.search(text) is None)
