"""Rows of a user's own conversations in OpenAI's chat format or ShareGPT's, checked one by one.

A file is JSON lines or parquet (with pyarrow installed). A row has `messages`, or `conversations`, and, if
functions were declared, `tools`. Null fields count as absent. A row of ShareGPT may also have `system`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ostinato.infra.platform.bounded_files import parse_json
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.row_files import ROW_SUFFIXES, read_rows

FOLLOWS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_CONVERSATIONS = "conversations"  # ShareGPT's field: a list of {from, value}
_CALL = "function_call"
# Speakers of FastChat (https://github.com/lm-sys/FastChat/blob/main/docs/training.md) and LLaMA-Factory
# (https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md).
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    _CALL: "assistant",
    "observation": "tool",
    "tool": "tool",
}
_MAX_SHOWN = 80  # characters of a value in an error message
_EMPTY = "{} holds no conversation, wanted one or more rows with messages"


class _Row(Record):
    @model_validator(mode="before")
    @classmethod
    def _nulls_are_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


def _also_written(empty: str, wanted: str) -> BeforeValidator:
    """Also accepts a field as JSON text. An empty text is read as `empty`."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_json("it", value or empty, ValueError)
        except ValueError as error:
            raise ValueError(f"no JSON ({error}), wanted {wanted}") from None

    return BeforeValidator(parse)


class CalledFunction(_Row):
    """Name and arguments of a call."""

    name: str = Field(min_length=1)
    arguments: Annotated[dict[str, Any], _also_written("{}", "an object as JSON")] = Field(
        default={}
    )

    @field_validator("arguments")
    @classmethod
    def _finite(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(arguments, allow_nan=False)
        except ValueError:
            raise ValueError("a number is NaN or infinite, wanted only finite ones") from None
        return arguments


class Call(_Row):
    """A call in an answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Row):
    """Text and calls of one message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[Call, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    weight: Literal[0, 1] = 1
    """0: the answer is context only and not learned"""

    @field_validator("role", mode="before")
    @classmethod
    def _renamed(cls, value: Any) -> Any:
        return "system" if value == "developer" else value

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Joins the texts of a list of parts."""
        if not isinstance(value, list):
            return value
        texts: list[str] = []
        for part in value:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"a part is {_show(part)}, wanted only parts of type text")
            texts.append(text)
        return "".join(texts)

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError(
                f"a {self.role} message has calls or thoughts, wanted them only in answers"
            )
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(
                f"tool_call_id {self.tool_call_id!r} is in a {self.role} message, wanted role tool"
            )
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is null or absent, wanted a text, or tool_calls in an answer")
        return self


class Declared(BaseModel):
    """The checked part of a declared function. The template shows the whole function."""

    name: str = Field(min_length=1)


class ChatTool(BaseModel):
    """A declared function."""

    type: Literal["function"]
    function: Declared


class ChatConversation(_Row):
    """Messages in order. The last is an answer."""

    place: str
    """file and row, for error messages"""
    messages: tuple[Message, ...] = Field(min_length=2)
    tools: Annotated[
        tuple[dict[str, Any], ...], _also_written("[]", "a list of tools as JSON")
    ] = ()

    @model_validator(mode="after")
    def _in_turn(self) -> "ChatConversation":
        before = None
        for index, message in enumerate(self.messages):
            if message.role not in FOLLOWS[before]:
                raise ValueError(
                    f"message {index} is by {message.role!r} after {before or 'nothing'!r}, wanted "
                    f"{' or '.join(FOLLOWS[before])}"
                )
            before = message.role
        if before != "assistant":
            raise ValueError(f"the last message is by {before!r}, wanted 'assistant'")
        return self

    @model_validator(mode="after")
    def _calls_answered(self) -> "ChatConversation":
        """Requires a result for each call and a call for each result. Calls written as text have no ids."""
        open_ids: list[str | None] = []
        for index, message in enumerate(self.messages):
            if message.role == "tool" and (open_ids or message.tool_call_id is not None):
                answered = message.tool_call_id if len(open_ids) != 1 else open_ids[0]
                if message.tool_call_id not in (None, answered) or answered not in open_ids:
                    wanted = ", ".join(map(repr, open_ids)) or "none, since no call is open"
                    raise ValueError(
                        f"message {index} has tool_call_id {message.tool_call_id!r}, wanted one of {wanted}"
                    )
                open_ids.remove(answered)
            elif open_ids:  # also if ids are absent
                raise ValueError(
                    f"message {index} is by {message.role!r} and call {open_ids[0]!r} has no result, wanted "
                    "a tool message for each call"
                )
            open_ids += [call.id for call in message.tool_calls]
            named = [call_id for call_id in open_ids if call_id is not None]
            twice = next((call_id for call_id in named if named.count(call_id) > 1), None)
            if twice is not None:
                raise ValueError(
                    f"message {index} has two calls with id {twice!r}, wanted unique ids"
                )
        return self

    @model_validator(mode="after")
    def _declared(self) -> "ChatConversation":
        names = []
        for index, tool in enumerate(self.tools):
            try:
                names.append(ChatTool.model_validate(tool).function.name)
            except ValidationError as error:
                raise ValueError(f"tools.{index}.{_describe(error)}") from None
        for index, message in enumerate(self.messages):
            for call in message.tool_calls:
                if names and call.function.name not in names:
                    raise ValueError(
                        f"message {index} calls {call.function.name!r}, which tools does not declare, wanted "
                        f"one of {', '.join(names)}"
                    )
        return self

    @property
    def in_call_order(self) -> list[Message]:
        """The messages, with the results of each answer in the order of its calls."""
        ordered: list[Message] = []
        open_places: dict[int, str | None] = {}  # of results, with the ids of their calls
        for message in self.messages:
            if message.role == "tool" and open_places:
                ids = open_places.items()
                place = next((at for at, each in ids if each == message.tool_call_id), None)
                place = min(open_places) if place is None else place
                ordered[place] = message
                del open_places[place]
                continue
            ordered.append(message)
            ids = enumerate((call.id for call in message.tool_calls), start=len(ordered))
            open_places = dict(ids)
            ordered += [message] * len(open_places)
        return ordered[: len(ordered) - len(open_places)]  # the last answer's calls have no results

    def as_messages(self) -> list[dict[str, Any]]:
        """The messages in the form of chat templates."""
        kept = {"role", "content"}
        return [
            {key: value for key, value in one.items() if value or key in kept}
            for one in (
                message.model_dump(mode="json", exclude={"weight"})
                for message in self.in_call_order
            )
        ]


def read_conversations(path: Path) -> list[ChatConversation]:
    """All conversations of a file. ConfigError names row, field, value seen and value wanted."""
    found = list(_read(path))
    if not found:
        raise ConfigError(_EMPTY.format(path))
    return found


def check_conversations(path: Path) -> None:
    """Raises as `read_conversations` does, and keeps no row."""
    if not sum(1 for _ in _read(path)):
        raise ConfigError(_EMPTY.format(path))


def _read(path: Path) -> Iterator[ChatConversation]:
    for number, row in read_rows(path, ROW_SUFFIXES):
        place = f"{path}, row {number}"
        if path.suffix == ".parquet":  # parquet's structures have every field in every row
            row = _without_nulls(row)
        if isinstance(row, dict) and "messages" not in row and _CONVERSATIONS in row:
            row = _read_sharegpt(place, row)
        if not isinstance(row, dict) or "messages" not in row:
            raise ConfigError(
                f"{place}: no field messages, wanted a list of messages, or {_CONVERSATIONS} as ShareGPT has them"
            )
        if row.get("functions") is not None:
            raise ConfigError(
                f"{place}: functions = {_show(row['functions'])}, wanted tools: OpenAI's older form is not supported"
            )
        fields = {"place": place, "messages": row["messages"], "tools": row.get("tools")}
        try:
            yield ChatConversation.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{place}: {_describe(error)}") from None


def _read_sharegpt(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with `messages` in place of `conversations`."""
    spoken = row[_CONVERSATIONS]
    if not isinstance(spoken, list):
        raise ConfigError(f"{place}: {_CONVERSATIONS} is {spoken!r:.80}, wanted a list")
    opening = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = [
        _spoken_message(f"{place}: {_CONVERSATIONS}.{at}", it) for at, it in enumerate(spoken)
    ]
    return {**row, "messages": [*opening, *messages]}


def _spoken_message(place: str, spoken: Any) -> dict[str, Any]:
    speaker = spoken.get("from") if isinstance(spoken, Mapping) else None
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise ConfigError(f"{place}.from is {speaker!r:.80}, wanted one of {', '.join(_SPEAKERS)}")
    text = spoken.get("value")
    if not isinstance(text, str):
        raise ConfigError(f"{place}.value is {text!r:.80}, wanted a text")
    if speaker != _CALL:
        return {"role": _SPEAKERS[speaker], "content": text}
    called = parse_json(f"{place}.value", text)
    calls = called if isinstance(called, list) else [called]
    return {"role": "assistant", "tool_calls": [{"function": call} for call in calls]}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _describe(error: ValidationError) -> str:
    """Field, value seen and value wanted of the first error."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    says = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and "wanted" in says and not isinstance(first["input"], str):
        return f"{field}: {says}" if field else says
    return f"{field or 'messages'}: {says}, not {_show(first['input'])}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
