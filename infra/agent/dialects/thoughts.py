r"""Thoughts in an answer, which are not searched for calls.

A thought runs from an opening mark to the next closing mark, or else to the end of the answer. The answer begins
within a thought if the end of the prompt opened one. If a closing mark has no opening mark, all text before the last
such mark is a thought. A mark within a whole call belongs to the call's arguments, and a mark between quotes or
backticks is only mentioned.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.infra.agent.dialects.spans import FindCalls, first_of
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.transcript import CallStatus
from ostinato.models.rendering import Renderer

# from the templates and special tokens of Qwen3, Hermes 3, Seed OSS, MiniMax M3, LongCat and others
_NAMES = r"(?i:(?:\w+[:_]|ant)?think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratch_?pad|inner_monologue)"
_OPENS = rf"<{_NAMES}>|\[THINK\]|\u25c1think\u25b7|<\|START_THINKING\|>|<\|begin_of_thought\|>"
_CLOSES = rf"</{_NAMES}>|\[/THINK\]|\u25c1/think\u25b7|<\|END_THINKING\|>|<\|end_of_thought\|>"


def _not_quoted(marks: str) -> str:
    return rf"(?<![`'\"])(?:{marks})|(?:{marks})(?![`'\"])"


_CLOSING = re.compile(_not_quoted(_CLOSES))
_MARK = re.compile(f"(?P<open>{_not_quoted(_OPENS)})|{_not_quoted(_CLOSES)}")
_LEFT_OPEN = re.compile(rf"(?:{_OPENS})(?!.*(?:{_CLOSES}))", re.DOTALL)
_MAX_HEADER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Positions of an answer's thoughts, and of its first call outside of them."""

    thoughts: tuple[tuple[int, int], ...]
    call_at: int | None = None


def part_answer(text: str, find_calls: FindCalls, *, is_opened: bool) -> AnswerParts:
    """The parts of a text. `is_opened`: the prompt opened a thought."""
    next_call = first_of(find_calls)(text)
    thoughts: list[tuple[int, int]] = []
    call_at: int | None = None
    begin, position = (0 if is_opened else None), 0
    mark = _MARK.search(text)
    while True:
        if begin is not None:
            closing = _CLOSING.search(text, position)
            position = len(text) if closing is None else closing.end()
            thoughts.append((begin, position))
            begin = None
        if mark is not None and mark.start() < position:
            mark = _MARK.search(text, position)
        call = next_call(position)
        if call is not None and (mark is None or call[0] < mark.start()):
            position, call_at = call[1], call[0] if call_at is None else call_at
        elif mark is None:
            return AnswerParts(tuple(thoughts), call_at)
        else:
            position = mark.end()
            if mark["open"] is not None:
                begin = mark.start()
            elif not is_opened:
                thoughts, call_at = [(0, position)], None


def parse_outside(
    text: str, find_calls: FindCalls, parse: Callable[[str], ParsedAnswer], *, is_opened: bool
) -> ParsedAnswer:
    """The calls and prose of a text. Thoughts are prose, even if they contain calls."""
    thoughts = part_answer(text, find_calls, is_opened=is_opened).thoughts
    if not thoughts:
        return parse(text)
    mark = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    masked, position = "", 0
    for begin, end in thoughts:
        masked += text[position:begin] + mark
        position = end
    parsed = parse(masked + text[position:])
    first, *pieces = parsed.prose.split(mark)
    thought_texts = [text[begin:end] for begin, end in thoughts]
    prose = first + "".join(
        thought + piece for thought, piece in zip(thought_texts, pieces, strict=False)
    )
    calls = tuple(_without_thought(call, mark) for call in parsed.calls)
    return replace(parsed, calls=calls, prose=prose)


def _without_thought(call: ParsedCall, mark: str) -> ParsedCall:
    """The call, malformed if a thought stood in it: its text is no argument."""
    if not any(mark in text for text in (call.tool, *call.arguments, *call.arguments.values())):
        return call
    error = "a thought stands in the call, wanted the call alone"
    return ParsedCall(
        call.tool.replace(mark, ""), {}, CallStatus.MALFORMED, error, call_id=call.call_id
    )


def opens_thought(renderer: Renderer, token_ids: list[int]) -> bool:
    """Whether a prompt ends within a thought: the header of the answer opens one."""
    size = renderer.header_size(token_ids)
    tail = token_ids[-_MAX_HEADER_TOKENS:]
    if not size and renderer.end_id in tail:
        size = tail[::-1].index(renderer.end_id)
    header = renderer.decode(token_ids[len(token_ids) - size :])
    return _LEFT_OPEN.search(header) is not None
