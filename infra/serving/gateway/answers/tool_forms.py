"""Tools of chats: how a prompt declares them, and the conversion of calls from and to OpenAI's form.

`OwnTools`: tools that the model was trained on, in the compact dialect's tags. `ClientTools`: any functions that a
client declares, for imported models. The model's chat template declares them, and a call has the published form
that the import chose. If the template has no tools, the system message declares them, and a call is JSON between
`<tool_call>` tags.
"""

import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact.calls import FIND_CALLS, parse_answer
from ostinato.infra.agent.dialects.compact.tools import COMPACT_TOOLS
from ostinato.infra.agent.dialects.dialect import dialect_of
from ostinato.infra.agent.dialects.published import forms
from ostinato.infra.agent.dialects.published.choice import find_dialect
from ostinato.infra.agent.dialects.published.json_calls import WrittenCall, whole_json
from ostinato.infra.agent.dialects.published.reading import CallForm, read_calls
from ostinato.infra.agent.dialects.spans import FindCalls, calls_like, first_of
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


_JSON_CALLS = calls_like(rf'{CALL_START}\s*[\[{{](?:"(?:[^"\\]|\\.)*+"|[^"<])*+{CALL_END}')
_OWN_CALL_SO_FAR = first_of(FIND_CALLS, calls_like("<.*"))
CLIENT_FORMS: Mapping[str, CallForm] = {
    "qwen3_coder": forms.QWEN3_CODER_FORM, "llama3": forms.LLAMA3_FORM, "mistral": forms.MISTRAL_FORM,
    "deepseek_v3": forms.DEEPSEEK_V3_FORM, "deepseek_v31": forms.DEEPSEEK_V31_FORM,
    "kimi_k2": forms.KIMI_K2_FORM, "glm4": forms.GLM4_FORM,
}  # fmt: skip
"""Forms of calls by dialect. Every other dialect has JSON between tags."""
_STRINGS = TypeAdapter(dict[str, str])
_OBJECT = TypeAdapter(dict[str, Any])
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as templates write them
_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip


Schema = Mapping[str, Any]  # a JSON schema


class ToolForm(Protocol):
    """Tools and calls as one kind of model reads and writes them."""

    is_published: bool  # whether calls have the form of the model's template

    def check(self, tools: Sequence[ToolDefinition]) -> None:
        """ApiError for tools that cannot be offered to the model."""
        ...

    def start(self, user: str, system: str | None, tools: Sequence[ToolDefinition]) -> list[int]:
        """Tokens that open a conversation with these tools."""
        ...

    def shown_definitions(self, tools: Sequence[ToolDefinition]) -> str:
        """The part of the definitions that the conversation's tokens contain."""
        ...

    def write_call(self, call: ToolCall) -> str:
        """A client's call as the model writes it."""
        ...

    def read(
        self,
        text: str,
        tools: Mapping[str, Schema],
        call_prefix: str,
        *,
        is_opened: bool = False,
    ) -> tuple[ChatMessage, ParsedAnswer]:
        """Assistant message of a model's text. Calls that cannot run, or are in thoughts, stay in the
        text. `tools`: schemas of their arguments by name. `is_opened`: the prompt opened a thought.
        """
        ...

    def showable(self, text: str, *, is_opened: bool = False) -> str:
        """The part of a growing text that cannot become a call, whatever follows."""
        ...


class OwnTools:
    """Tools that the model was trained on, in the compact dialect's tags."""

    is_published = False

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

    def shown_definitions(self, tools: Sequence[ToolDefinition]) -> str:
        return ""

    def write_call(self, call: ToolCall) -> str:
        """The primary argument has no tag unless it holds a `<`."""
        name = call.function.name
        tool = COMPACT_TOOLS.get(name)
        if tool is None:
            wanted = ", ".join(COMPACT_TOOLS)
            raise refusal(f"tool call {call.id} names tool {name!r}, wanted one of {wanted}")
        arguments = _arguments_of(call, _STRINGS, "an object of strings")
        bare = arguments.pop(tool.primary, "")
        body = "".join(f"<{key}>{value}</{key}>" for key, value in arguments.items())
        if "<" in bare and tool.primary != "lines":
            body, bare = body + f"<{tool.primary}>{bare}</{tool.primary}>", ""
        return f"<{name}>{body}{bare}</{name}>"

    def read(
        self,
        text: str,
        tools: Mapping[str, Schema],
        call_prefix: str,
        *,
        is_opened: bool = False,
    ) -> tuple[ChatMessage, ParsedAnswer]:
        parsed = parse_outside(
            text, FIND_CALLS, lambda rest: parse_answer(rest, tools), is_opened=is_opened
        )
        indent = text[: -len(text.lstrip())]  # a stream has already sent it
        parsed = replace(parsed, prose=(indent + parsed.prose).rstrip())
        written = [json.dumps(call.arguments) for call in parsed.calls]
        return _message(text, parsed, written, call_prefix), parsed

    def showable(self, text: str, *, is_opened: bool = False) -> str:
        return _before_calls(text, _OWN_CALL_SO_FAR, is_opened=is_opened).rstrip()


class ClientTools:
    """Functions that a client declares and runs."""

    def __init__(self, renderer: Renderer, dialect: str = "") -> None:
        """`dialect`: the dialect of the model, if it is a published one. Otherwise the template determines it."""
        template = renderer if isinstance(renderer, TemplateRenderer) else None
        name = dialect
        if template is not None and dialect not in CLIENT_FORMS:
            name = find_dialect(template.template) or ""
        shows = template is not None and template.shows_functions
        form = CLIENT_FORMS.get(name) if shows else None
        self.is_published = form is not None
        self._states_tools = form is not None or (template is not None and template.states_tools)
        self._renderer, self._form = renderer, form or forms.TAGGED_JSON
        # the tags alone delimit JSON of any depth
        self._find_calls = _JSON_CALLS if form is None else form.find_calls
        unfinished = "|".join(_unfinished_call(opener) for opener in self._form.openers)
        self._call_so_far = first_of(self._find_calls, calls_like(unfinished))

    def check(self, tools: Sequence[ToolDefinition]) -> None:
        return None

    def start(self, user: str, system: str | None, tools: Sequence[ToolDefinition]) -> list[int]:
        renderer = self._renderer
        if isinstance(renderer, TemplateRenderer) and self._states_tools:
            return renderer.start(user, system, _definitions(tools))
        if tools:
            explained = EXPLANATION.format(tools=self.shown_definitions(tools))
            system = explained if system is None else f"{system}\n\n{explained}"
        return renderer.start(user, system)

    def shown_definitions(self, tools: Sequence[ToolDefinition]) -> str:
        return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in _definitions(tools))

    def write_call(self, call: ToolCall) -> str:
        arguments = _arguments_of(call, _OBJECT, "an object")
        written = self._form.write(call.function.name, arguments)
        return f"\n{written}" if written.startswith(CALL_START) else written

    def read(
        self,
        text: str,
        tools: Mapping[str, Schema],
        call_prefix: str,
        *,
        is_opened: bool = False,
    ) -> tuple[ChatMessage, ParsedAnswer]:
        written: list[str] = []
        parsed = parse_outside(
            text,
            self._find_calls,
            lambda rest: self._parse(rest, tools, written),
            is_opened=is_opened,
        )
        return _message(text, parsed, written, call_prefix), parsed

    def showable(self, text: str, *, is_opened: bool = False) -> str:
        return _before_calls(text, self._call_so_far, is_opened=is_opened).rstrip()

    def _parse(self, text: str, tools: Mapping[str, Schema], written: list[str]) -> ParsedAnswer:
        """Calls, and the text outside of them. Adds the arguments of each call as JSON to `written`."""
        found, prose = read_calls(text, self._form)
        found = [
            call if call.is_typed else _typed(call, tools.get(call.name, {})) for call in found
        ]
        written += [json.dumps(call.arguments, ensure_ascii=False) for call in found]
        return ParsedAnswer(tuple(_call_of(call, tools) for call in found), prose.rstrip())


def _unfinished_call(opener: str) -> str:
    """Pattern of `opener` and everything after it, or of a text's end that may begin `opener`."""
    begin, *rest = (re.escape(letter) for letter in opener)
    so_far = "".join(f"(?:{letter}" for letter in (begin, *rest)) + ")?" * len(opener)
    return rf"{re.escape(opener)}.*|(?={begin}){so_far}\Z"


def _typed(call: WrittenCall, schema: Schema) -> WrittenCall:
    """The call with each argument's text read as the type in its function's schema. An argument stays text when the
    schema gives no type or the text does not fit it.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):  # clients write schemas, which nobody checks
        properties = {}
    arguments = {
        key: _as_declared(text, properties.get(key)) for key, text in call.arguments.items()
    }
    return replace(call, arguments=arguments)


def _as_declared(text: str, declared: Any) -> Any:
    kinds = _declared_kinds(declared)
    if None in kinds or "string" in kinds:
        return text
    with contextlib.suppress(ValueError, RecursionError):
        value = whole_json(_PYTHON_CONSTANTS.get(text, text))
        wanted = [_KINDS[kind] for kind in kinds if isinstance(kind, str) and kind in _KINDS]
        if type(value) in [kind for each in wanted for kind in each]:
            return value
    return text


def _declared_kinds(declared: Any) -> list[Any]:
    """The types in a schema, also those of its alternatives. None among them: any type."""
    if not isinstance(declared, Mapping):
        return [None]
    forms = declared.get("anyOf") or declared.get("oneOf")
    if isinstance(forms, list):
        return [kind for form in forms for kind in _declared_kinds(form)]
    kinds = declared.get("type")
    return kinds if isinstance(kinds, list) else [kinds]


def form_of(harness: HarnessConfig, renderer: Renderer) -> ToolForm:
    """OwnTools for the compact dialect, ClientTools for dialects that a prompt explains."""
    if dialect_of(harness).is_explained:
        return ClientTools(renderer, harness.dialect)
    return OwnTools(renderer, harness.tools)


def _before_calls(text: str, find_calls: FindCalls, *, is_opened: bool) -> str:
    return text[: part_answer(text, find_calls, is_opened=is_opened).call_at]


def _definitions(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _call_of(call: WrittenCall, tools: Collection[str]) -> ParsedCall:
    if call.error:
        return ParsedCall("", {}, CallStatus.MALFORMED, call.error)
    arguments = {
        key: item if isinstance(item, str) else json.dumps(item)
        for key, item in call.arguments.items()
    }
    if call.name not in tools:
        error = f"no tool {call.name[:60]}, wanted one of {', '.join(tools)}"
        return ParsedCall(call.name, arguments, CallStatus.UNKNOWN_TOOL, error)
    return ParsedCall(call.name, arguments)


def _message(
    text: str, parsed: ParsedAnswer, arguments: Sequence[str], call_prefix: str
) -> ChatMessage:
    """The calls if all can run, else the unchanged text. `arguments`: JSON of each call."""
    if not parsed.calls or any(call.status is not CallStatus.OK for call in parsed.calls):
        return ChatMessage(role="assistant", content=text)
    calls = [
        ToolCall(id=f"{call_prefix}{index}", function=FunctionCall(name=call.tool, arguments=each))
        for index, (call, each) in enumerate(zip(parsed.calls, arguments, strict=True))
    ]
    return ChatMessage(role="assistant", content=parsed.prose or None, tool_calls=calls)


def _arguments_of(call: ToolCall, kind: TypeAdapter[dict[str, Any]], wanted: str) -> dict[str, Any]:
    try:
        return kind.validate_json(call.function.arguments or "{}")
    except ValidationError as error:
        raise refusal(
            f"arguments of tool call {call.id} are {call.function.arguments!r}, wanted JSON, "
            f"{wanted}: {error.errors()[0]['msg']}"
        ) from error


def refusal(message: str) -> ApiError:
    """ApiError for a fault in a request's messages."""
    return ApiError(400, message, param="messages")
