"""Form in which a chat template writes tool results after calls.

Many templates refuse results without their calls, or name a result by its call. The calls are
passed to the template only for this: their text is the model's own and is never encoded again.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateError

QUESTION, RESULT = "\u2402question\u2403", "\u2402result\u2403"
TOOL_NAME = "example_tool"
EXAMPLE_TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "", "parameters": {"type": "object"}},
}
Message = dict[str, Any]
Show = Callable[[Sequence[Message]], str]
"""Renders messages and the header of a further answer. TemplateError if the template refuses them."""

FindText = Callable[[str], str | None]
"""The first control text in a text."""


class NamedCall(NamedTuple):
    """A call of the last answer, by which a template may name its result."""

    name: str
    call_id: str = ""  # empty: the index of the call is used

    def without_texts(self, find: FindText) -> "NamedCall":
        """The call without a name or an id in which `find` finds a control text, as a model may write one."""
        kept = ("" if RESULT in text or find(text) is not None else text for text in self)
        return NamedCall(*kept)


def example_call(arguments: Any) -> Message:
    """A call to probe a template's form. Its id has the length that Mistral's templates require."""
    function = {"name": TOOL_NAME, "arguments": arguments}
    return {"type": "function", "id": "123456789", "function": function}


@dataclass(frozen=True, slots=True)
class CallResults:
    """Form of calls that a template accepts: arguments as objects or JSON, and calls per answer."""

    show: Show
    ends: Sequence[str]  # texts of the tokens that end an answer
    arguments: Any
    most_calls: int

    def messages(
        self, calls: Sequence[NamedCall], results: Sequence[str], note: str | None = None
    ) -> list[Message]:
        """Question, answer with the calls, and their results. The note is appended to the last
        result, since templates refuse a user's message there.
        """
        if note is not None:
            results = [*results[:-1], f"{results[-1]}\n[{note}]"]
        ids = [call.call_id or f"{index:09d}" for index, call in enumerate(calls)]
        functions = [
            {"name": call.name or "unknown", "arguments": self.arguments} for call in calls
        ]
        written = [
            {"type": "function", "id": call_id, "function": function}
            for call_id, function in zip(ids, functions, strict=True)
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": written[: self.most_calls]}
        shown = [
            {"role": "tool", "content": text, "tool_call_id": call_id, "name": function["name"]}
            for text, call_id, function in zip(results, ids, functions, strict=True)
        ]
        return [{"role": "user", "content": QUESTION}, answer, *shown]

    def before_results(
        self, calls: Sequence[NamedCall], find: FindText
    ) -> tuple[Sequence[NamedCall], str]:
        """The calls as the template accepts them, and its text up to the end of the answer with them."""
        calls = [call.without_texts(find) for call in calls]
        results = [RESULT] * len(calls)
        try:
            shown = self.show(self.messages(calls, results))
        except TemplateError:  # Mistral's templates refuse ids of another length than theirs
            calls = [NamedCall(call.name) for call in calls]
            shown = self.show(self.messages(calls, results))
        before = shown[: shown.index(RESULT)]
        end = max(before.rfind(text) + len(text) for text in self.ends if text in before)
        return calls, before[:end]


def find_call_results(show: Show, ends: Sequence[str]) -> CallResults | None:
    """The form that the template accepts. None if it writes no results after calls."""
    for arguments, most in itertools.product(({}, "{}"), (sys.maxsize, 1)):
        found = CallResults(show, ends, arguments, most)
        calls = [NamedCall(TOOL_NAME)] * 2
        try:
            shown = show(found.messages(calls, [RESULT, RESULT]))
        except TemplateError:
            continue
        before = shown.partition(RESULT)[0]
        if RESULT in shown and any(text in before for text in ends):
            return found
    return None
