"""ShareGPT's form of a conversation, read as OpenAI's.

A row has `conversations`, a list of {from, value}, and may have `system` and `tools`. The speakers are those of FastChat
(https://github.com/lm-sys/FastChat/blob/main/docs/training.md) and LLaMA-Factory
(https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md).
"""

from collections.abc import Mapping
from typing import Any

from ostinato.infra.platform.bounded_files import parse_json
from ostinato.infra.platform.errors import ConfigError

CONVERSATIONS = "conversations"
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_CALL = "function_call"


def read_sharegpt(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with `messages` in place of `conversations`. ConfigError names place, field, value and what is wanted."""
    spoken = row[CONVERSATIONS]
    if not isinstance(spoken, list):
        raise ConfigError(f"{place}: {CONVERSATIONS} is {spoken!r:.80}, wanted a list")
    opening = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = [_message(f"{place}: {CONVERSATIONS}.{at}", it) for at, it in enumerate(spoken)]
    return {**row, "messages": [*opening, *messages]}


def _message(place: str, spoken: Any) -> dict[str, Any]:
    speaker = spoken.get("from") if isinstance(spoken, Mapping) else None
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise ConfigError(f"{place}.from is {speaker!r:.80}, wanted one of {', '.join(_ROLES)}")
    text = spoken.get("value")
    if not isinstance(text, str):
        raise ConfigError(f"{place}.value is {text!r:.80}, wanted a text")
    if speaker != _CALL:
        return {"role": _ROLES[speaker], "content": text}
    called = parse_json(f"{place}.value", text)
    calls = called if isinstance(called, list) else [called]
    return {"role": "assistant", "tool_calls": [{"function": call} for call in calls]}
