"""Reads the calls of published models in an answer, each form by its entry in the table of forms.py.

A `Way` is one way to write a call: a pattern up to its body, the body, and a pattern after it. The parser neither
guesses nor raises. Text after a call that cannot be read is not read either, because it may be the rest of a value.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ostinato.infra.agent.dialects.full.calls import call_from_json, call_from_texts
from ostinato.infra.agent.dialects.published.json_calls import (
    WrittenCall,
    call_of_json,
    read_json,
    whole_json,
)
from ostinato.infra.agent.dialects.spans import FindCalls, calls_like, first_of, tagged_calls
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.tools.definition import Tool
from ostinato.infra.agent.transcript import CallStatus

_STRING = r'"(?:[^"\\]|\\.)*+"'
_MAX_LEVELS = 32  # of a call whose marks of thoughts are known to be its own


def _object(levels: int) -> str:
    """Pattern of a JSON object with at most this many levels."""
    inner = f"|{_object(levels - 1)}" if levels > 1 else ""
    return rf"\{{(?:{_STRING}|[^\"{{}}<]{inner})*+\}}"


_OBJECT = _object(_MAX_LEVELS)
_JSON = rf"(?:{_OBJECT}|\[\s*{_OBJECT}(?:\s*,\s*{_OBJECT})*+\s*\])"


@dataclass(frozen=True, slots=True)
class Texts:
    """Arguments as tagged texts: patterns that open and close one; the first has a group `key`."""

    opening: str
    closing: str  # with the texts that may follow: the closing tag alone may be part of a value
    drops_newlines: bool = False  # one line end at each side belongs to the form


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write a call. Groups of `begin`: `name` if the body is the arguments alone, `id` if any."""

    begin: str
    body: Literal["call", "arguments"] | Texts
    end: str = ""


@dataclass(frozen=True)
class CallForm:
    """The calls of one family of published models."""

    ways: tuple[Way, ...]
    marks: str
    """pattern of texts that only calls contain: such a text that matches no way is a malformed call"""
    wanted: str
    """right form of a call, for messages"""
    written: str = ""
    """a call with the placeholders NAME and ARGUMENTS (JSON) or, for texts, the form of one argument in brackets"""
    hidden: str = "(?!)"
    """pattern of thoughts that this form alone marks"""
    several: bool = True
    """whether one answer may hold several calls"""
    openers: tuple[str, ...] = ()
    """texts that begin a call, which a stream holds back. Empty: the gateway does not read this form"""

    @cached_property
    def find_calls(self) -> FindCalls:
        """Whole calls in a text."""
        return first_of(*map(_whole_calls, self.ways))

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as a model writes it. `parse` gives back the same arguments."""
        head, *texts = re.split(r"\[([^\]]*KEY[^\]]*)\]", self.written)
        values = {"NAME": name, "ARGUMENTS": json.dumps(arguments, ensure_ascii=False)}
        parts = [re.sub("NAME|ARGUMENTS", lambda place: values[place[0]], head)]
        for key, value in arguments.items() if texts else ():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            tagged = {"KEY": key, "VALUE": text}
            parts.append(re.sub("KEY|VALUE", lambda place: tagged[place[0]], texts[0]))  # noqa: B023
        return "".join([*parts, *texts[1:]])

    @cached_property
    def openings(self) -> tuple[re.Pattern[str], ...]:
        """Patterns of the beginnings of hidden text, of each way, and of malformed calls, in this order."""
        patterns = (self.hidden, *(way.begin for way in self.ways), self.marks)
        return tuple(re.compile(pattern, re.DOTALL) for pattern in patterns)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAnswer:
        """The calls of an answer, checked against the tools, and the text outside of them."""
        written, prose = read_calls(text, self)
        calls = [_checked(call, tools) for call in written]
        if not self.several:
            calls[1:] = [
                ParsedCall(call.tool, call.arguments, CallStatus.INVALID_ARGUMENTS, _ONE_CALL)
                for call in calls[1:]
            ]
        return ParsedAnswer(tuple(calls), prose.strip())


_ONE_CALL = "a further call in one answer, wanted one call per answer"


def read_calls(text: str, form: CallForm) -> tuple[list[WrittenCall], str]:
    """The calls of a text in order, and the prose around them."""
    calls: list[WrittenCall] = []
    prose, position = "", 0
    following = [pattern.search(text) for pattern in form.openings]
    while True:
        for index, match in enumerate(following):
            if match is not None and match.start() < position:
                following[index] = form.openings[index].search(text, position)
        found = [(match.start(), index, match) for index, match in enumerate(following) if match]
        if not found:
            break
        start, index, opening = min(found, key=lambda each: each[:2])
        if not index:
            prose += text[position : opening.end()]
            position = opening.end()
            continue
        prose += text[position:start]
        try:
            if index > len(form.ways):
                raise ValueError(
                    f"{text[start : start + 40]!r} opens no call, wanted {form.wanted}"
                )
            read, position = _read_call(text, opening, form.ways[index - 1], form.wanted)
        except (ValueError, RecursionError) as error:
            name = opening.groupdict().get("name") or ""
            calls.append(WrittenCall(name, {}, error=f"{error}; nothing behind it was read"))
            position = start
            break
        calls += read
    return calls, prose + text[position:]


def _read_call(
    text: str, opening: re.Match[str], way: Way, wanted: str
) -> tuple[list[WrittenCall], int]:
    """The calls after an opening, one or a list of them, and the position after them."""
    groups = opening.groupdict()
    name, call_id = groups.get("name") or "", groups.get("id") or ""
    if isinstance(way.body, Texts):
        texts, end = _read_texts(text, opening.end(), way.body)
        calls = [WrittenCall(name, texts, is_typed=False, call_id=call_id)]
    else:
        value, end = read_json(text, opening.end())
        if way.body == "arguments":
            value = {"name": name, "arguments": value}
        calls = [call_of_json(each) for each in (value if isinstance(value, list) else [value])]
        if way.body == "arguments":
            calls = [WrittenCall(name, calls[0].arguments, call_id=call_id)]
    closing = re.compile(way.end).match(text, end)
    if closing is None:
        raise ValueError(f"{text[end : end + 40]!r} follows the arguments, wanted {wanted}")
    return calls, closing.end()


def _read_texts(text: str, position: int, form: Texts) -> tuple[dict[str, str], int]:
    """Tagged texts by key, and the position after them."""
    texts: dict[str, str] = {}
    opening, closing = re.compile(form.opening), re.compile(form.closing)
    while begin := opening.match(text, position):
        end, key = closing.search(text, begin.end()), begin["key"].strip()
        if end is None:
            raise ValueError(f"the value of {key[:60]!r} has no end")
        if key in texts:
            raise ValueError(f"{key[:60]} is given twice, wanted it once")
        value = text[begin.end() : end.start()]
        if form.drops_newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        texts[key], position = value, end.end()
    return texts, position


def _checked(call: WrittenCall, tools: Mapping[str, Tool]) -> ParsedCall:
    if call.error:
        return ParsedCall(call.name, {}, CallStatus.MALFORMED, call.error, call_id=call.call_id)
    if call.is_typed:
        return call_from_json(call.name, json.dumps(call.arguments), tools, call.call_id)
    texts = {key: _plain(tools.get(call.name), key, text) for key, text in call.arguments.items()}
    return call_from_texts(call.name, texts, tools, call.call_id)


def _plain(tool: Tool | None, key: str, text: str) -> str:
    """A tagged value as a tool reads it: templates write lists as JSON, and truth values as Python does."""
    argument = None if tool is None else tool.argument(key)
    if argument is not None and argument.kind == "boolean":
        return text.lower()
    if argument is not None and argument.kind == "list" and text.lstrip().startswith("["):
        try:
            entries = whole_json(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(entries, list) and all(isinstance(entry, str) for entry in entries):
            return "\n".join(entries)
    return text


def _whole_calls(way: Way) -> FindCalls:
    if isinstance(way.body, Texts):
        return tagged_calls(way.begin, way.body.opening, way.body.closing, way.end)
    return calls_like(rf"{way.begin}\s*{_JSON}{way.end}")
