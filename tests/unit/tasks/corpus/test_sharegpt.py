"""ShareGPT's rows are read as the same conversation in OpenAI's form, and refused by place, field and value."""

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.corpus.chat_rows import ChatConversation, read_conversations

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"name": "add", "arguments": {"a": 12, "b": 3}}
SPOKEN = [
    {"from": "human", "value": "12 + 3?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "15"},
    {"from": "gpt", "value": "15"},
]
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "12 + 3?"},
    {"role": "assistant", "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "15"},
    {"role": "assistant", "content": "15"},
]


def read(directory: Path, row: object) -> list[ChatConversation]:
    path = directory / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return read_conversations(path)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_a_row_is_the_same_conversation_in_both_forms(tmp_path: Path, tools: Any) -> None:
    shared = {"conversations": SPOKEN, "system": "Be short.", "tools": tools}
    opened = {"conversations": [{"from": "system", "value": "Be short."}, *SPOKEN], "tools": tools}
    plain = {"messages": MESSAGES, "tools": tools}
    assert read(tmp_path, shared) == read(tmp_path, opened) == read(tmp_path, plain)


def test_calls_at_the_same_time_are_one_answer(tmp_path: Path) -> None:
    calls = {"from": "function_call", "value": json.dumps([CALL, CALL])}
    spoken = [SPOKEN[0], calls, SPOKEN[2], SPOKEN[2], SPOKEN[3]]
    [found] = read(tmp_path, {"conversations": spoken})
    assert [len(message.tool_calls) for message in found.messages] == [0, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("spoken", "message"),
    [
        (
            [{"from": "bing", "value": "hi"}],
            r"row 1: conversations.0.from is 'bing', wanted one of",
        ),
        (
            [SPOKEN[0], {"from": "gpt", "value": None}],
            r"conversations.1.value is None, wanted a text",
        ),
        ([SPOKEN[0], {"from": "function_call", "value": "add(1)"}], r"conversations.1.value"),
        (["hi"], r"conversations.0.from is None"),
        ("hi", r"conversations is 'hi', wanted a list"),
        ([{"from": ["gpt"], "value": ""}], r"conversations.0.from is \['gpt'\]"),
        ([SPOKEN[0]], "messages: Tuple should have at least 2 items"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, spoken: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {"conversations": spoken})
