"""Tools of chats: how a prompt declares them, and the conversion of calls from and to OpenAI's form.

`OwnTools`: nano's tags over the tools it was trained on. `ClientTools`: whatever functions a client
declares, for models that other people trained; a call is JSON between `<tool_call>` tags. The model's
chat template declares them or, where it has no tools, the system message does.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact.calls import WHOLE_CALL, parse_answer
from ostinato.infra.agent.dialects.compact.tools import COMPACT_TOOLS
from ostinato.infra.agent.dialects.dialect import dialect_of
from ostinato.infra.agent.dialects.published.forms import TAGGED_JSON
from ostinato.infra.agent.dialects.published.json_calls import WrittenCall
from ostinato.infra.agent.dialects.published.reading import read_calls
from ostinato.infra.agent.dialects.thoughts import parse_outside, part_answer
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import (
    ChatMessage,
    FunctionCall,
    ToolCall,
    ToolDefinition,
)
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.chat_template import TemplateRenderer

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
EXPLANATION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


_JSON_CALL = rf'{CALL_START}\s*[\[{{](?:"(?:[^"\\]|\\.)*+"|[^"<])*+{CALL_END}'
_TAG_SO_FAR = "".join(f"(?:{re.escape(each)}" for each in CALL_START) + ")?" * len(CALL_START)
_CALL_SO_FAR = rf"{_JSON_CALL}|{CALL_START}.*|(?=<){_TAG_SO_FAR}\Z"  # an end may begin a tag
_STRINGS = TypeAdapter(dict[str, str])
_OBJECT = TypeAdapter(dict[str, Any])


class ToolForm(Protocol):
    """Tools and calls as one kind of model reads and writes them."""

    def check(self, tools: Sequence[ToolDefinition]) -> None:
        """ApiError for tools that the model cannot be given."""
        ...

    def start(self, user: str, system: str | None, tools: Sequence[ToolDefinition]) -> list[int]:
        """Tokens that open a conversation with these tools."""
        ...

    def stated(self, tools: Sequence[ToolDefinition]) -> str:
        """The part of the definitions that is in the conversation's tokens."""
        ...

    def write_call(self, call: ToolCall) -> str:
        """A client's call in the model's words."""
        ...

    def read(
        self, text: str, tools: Collection[str], call_prefix: str, *, is_opened: bool = False
    ) -> tuple[ChatMessage, ParsedAnswer]:
        """Assistant message of a model's text. Calls that cannot run, or are in thoughts, stay in the
        text. `is_opened`: the prompt opened a thought.
        """
        ...

    def showable(self, text: str, *, is_opened: bool = False) -> str:
        """The part of a growing text that is no call whatever follows."""
        ...


class OwnTools:
    """Tools that the model was trained on, in nano's tags."""

    def __init__(self, renderer: Renderer, names: Sequence[str]) -> None:
        self._renderer, self._names = renderer, names

    def check(self, tools: Sequence[ToolDefinition]) -> None:
        for tool in tools:
            if tool.function.name not in COMPACT_TOOLS or tool.function.name not in self._names:
                raise ApiError(
                    400,
                    f"tool is {tool.function.name!r}, wanted one of {', '.join(self._names)}: the "
                    "model was trained on these",
                    code="unknown_tool",
                    param="tools",
                )

    def start(self, user: str, system: str | None, tools: Sequence[ToolDefinition]) -> list[int]:
        return self._renderer.start(user, system)

    def stated(self, tools: Sequence[ToolDefinition]) -> str:
        return ""

    def write_call(self, call: ToolCall) -> str:
        """The primary argument has no tag where it holds no `<`."""
        name = call.function.name
        tool = COMPACT_TOOLS.get(name)
        if tool is None:
            wanted = ", ".join(COMPACT_TOOLS)
            raise _wrong(f"tool call {call.id} names tool {name!r}, wanted one of {wanted}")
        arguments = _arguments_of(call, _STRINGS, "an object of strings")
        bare = arguments.pop(tool.primary, "")
        body = "".join(f"<{key}>{value}</{key}>" for key, value in arguments.items())
        if "<" in bare and tool.primary != "lines":
            body, bare = body + f"<{tool.primary}>{bare}</{tool.primary}>", ""
        return f"<{name}>{body}{bare}</{name}>"

    def read(
        self, text: str, tools: Collection[str], call_prefix: str, *, is_opened: bool = False
    ) -> tuple[ChatMessage, ParsedAnswer]:
        parsed = parse_outside(
            text, WHOLE_CALL, lambda rest: parse_answer(rest, tools), is_opened=is_opened
        )
        indent = text[: -len(text.lstrip())]  # a stream has shown it before the call
        parsed = replace(parsed, prose=(indent + parsed.prose).rstrip())
        written = [json.dumps(call.arguments) for call in parsed.calls]
        return _message(text, parsed, written, call_prefix), parsed

    def showable(self, text: str, *, is_opened: bool = False) -> str:
        return _before_calls(text, f"{WHOLE_CALL}|<.*", is_opened=is_opened).rstrip()


class ClientTools:
    """Functions that a client declares and runs."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def check(self, tools: Sequence[ToolDefinition]) -> None:
        return None

    def start(self, user: str, system: str | None, tools: Sequence[ToolDefinition]) -> list[int]:
        renderer = self._renderer
        if isinstance(renderer, TemplateRenderer) and renderer.states_tools:
            return renderer.start(user, system, _definitions(tools))
        if tools:
            explained = EXPLANATION.format(tools=self.stated(tools))
            system = explained if system is None else f"{system}\n\n{explained}"
        return renderer.start(user, system)

    def stated(self, tools: Sequence[ToolDefinition]) -> str:
        return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in _definitions(tools))

    def write_call(self, call: ToolCall) -> str:
        arguments = _arguments_of(call, _OBJECT, "an object")
        written = json.dumps(
            {"name": call.function.name, "arguments": arguments}, ensure_ascii=False
        )
        return f"\n{CALL_START}\n{written}\n{CALL_END}"

    def read(
        self, text: str, tools: Collection[str], call_prefix: str, *, is_opened: bool = False
    ) -> tuple[ChatMessage, ParsedAnswer]:
        written: list[str] = []
        parsed = parse_outside(
            text, _JSON_CALL, lambda rest: _parse(rest, tools, written), is_opened=is_opened
        )
        return _message(text, parsed, written, call_prefix), parsed

    def showable(self, text: str, *, is_opened: bool = False) -> str:
        return _before_calls(text, _CALL_SO_FAR, is_opened=is_opened).rstrip()


def form_of(harness: HarnessConfig, renderer: Renderer) -> ToolForm:
    """OwnTools for the compact dialect, ClientTools for dialects that a prompt explains."""
    if dialect_of(harness).is_explained:
        return ClientTools(renderer)
    return OwnTools(renderer, harness.tools)


def _before_calls(text: str, call: str, *, is_opened: bool) -> str:
    return text[: part_answer(text, call, is_opened=is_opened).call_at]


def _definitions(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _parse(text: str, tools: Collection[str], written: list[str]) -> ParsedAnswer:
    """Calls and the text outside of them. Adds the arguments of each as JSON to `written`."""
    found, prose = read_calls(text, TAGGED_JSON)
    written += [json.dumps(call.arguments, ensure_ascii=False) for call in found]
    return ParsedAnswer(tuple(_call_of(call, tools) for call in found), prose.rstrip())


def _call_of(call: WrittenCall, tools: Collection[str]) -> ParsedCall:
    if call.error:
        return ParsedCall("", {}, CallStatus.MALFORMED, call.error)
    said = {
        key: item if isinstance(item, str) else json.dumps(item)
        for key, item in call.arguments.items()
    }
    if call.name not in tools:
        error = f"no tool {call.name[:60]}, wanted one of {', '.join(tools)}"
        return ParsedCall(call.name, said, CallStatus.UNKNOWN_TOOL, error)
    return ParsedCall(call.name, said)


def _message(
    text: str, parsed: ParsedAnswer, arguments: Sequence[str], call_prefix: str
) -> ChatMessage:
    """The calls if all can run, else the text as it is. `arguments`: JSON of each call."""
    if not parsed.calls or any(call.status is not CallStatus.OK for call in parsed.calls):
        return ChatMessage(role="assistant", content=text)
    calls = [
        ToolCall(id=f"{call_prefix}{index}", function=FunctionCall(name=call.tool, arguments=said))
        for index, (call, said) in enumerate(zip(parsed.calls, arguments, strict=True))
    ]
    return ChatMessage(role="assistant", content=parsed.prose or None, tool_calls=calls)


def _arguments_of(call: ToolCall, kind: TypeAdapter[dict[str, Any]], wanted: str) -> dict[str, Any]:
    try:
        return kind.validate_json(call.function.arguments or "{}")
    except ValidationError as error:
        raise _wrong(
            f"arguments of tool call {call.id} are {call.function.arguments!r}, wanted JSON, "
            f"{wanted}: {error.errors()[0]['msg']}"
        ) from error


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
