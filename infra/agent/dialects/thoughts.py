r"""Thoughts in an answer, which are not searched for calls.

A thought runs from an opening mark to the next closing mark, or else to the end of the answer. The answer begins
within a thought if the end of the prompt opened one. If a closing mark has no opening mark, all text before the last
such mark is a thought. A mark within a whole call belongs to the call's arguments, and a mark between quotes or
backticks is only mentioned.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.models.rendering import Renderer

# from the templates and special tokens of Qwen3, Hermes 3, Seed OSS, MiniMax M3, LongCat and others
_NAMES = r"(?i:(?:\w+[:_]|ant)?think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratch_?pad|inner_monologue)"
_OPENS = rf"<{_NAMES}>|\[THINK\]|\u25c1think\u25b7|<\|START_THINKING\|>|<\|begin_of_thought\|>"
_CLOSES = rf"</{_NAMES}>|\[/THINK\]|\u25c1/think\u25b7|<\|END_THINKING\|>|<\|end_of_thought\|>"


def _not_quoted(marks: str) -> str:
    return rf"(?<![`'\"])(?:{marks})|(?:{marks})(?![`'\"])"


_CLOSING = re.compile(_not_quoted(_CLOSES))
_FIRST_CHARACTERS = re.compile("[<[{`\u25c1]")  # of marks and calls
_LEFT_OPEN = re.compile(rf"(?:{_OPENS})(?!.*(?:{_CLOSES}))", re.DOTALL)
_MAX_HEADER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Positions of an answer's thoughts, and of its first call outside of them."""

    thoughts: tuple[tuple[int, int], ...]
    call_at: int | None = None


def part_answer(text: str, call: str, *, is_opened: bool) -> AnswerParts:
    """The parts of a text. `call`: pattern of a whole call. `is_opened`: the prompt opened a thought."""
    marks = f"(?P<open>{_not_quoted(_OPENS)})|(?P<close>{_not_quoted(_CLOSES)})|(?P<call>{call})"
    pattern = re.compile(marks, re.DOTALL)
    thoughts: list[tuple[int, int]] = []
    call_at: int | None = None
    begin, position = (0 if is_opened else None), 0
    while True:
        if begin is not None:
            closing = _CLOSING.search(text, position)
            position = len(text) if closing is None else closing.end()
            thoughts.append((begin, position))
        places = _FIRST_CHARACTERS.finditer(text, position)
        found = next(filter(None, (pattern.match(text, at.start()) for at in places)), None)
        if found is None:
            return AnswerParts(tuple(thoughts), call_at)
        position = found.end()
        begin = found.start() if found.lastgroup == "open" else None
        if found.lastgroup == "call" and call_at is None:
            call_at = found.start()
        if found.lastgroup == "close" and not is_opened:
            thoughts, call_at = [(0, position)], None


def parse_outside(
    text: str, call: str, parse: Callable[[str], ParsedAnswer], *, is_opened: bool
) -> ParsedAnswer:
    """The calls and prose of a text. Thoughts are prose, even if they contain calls."""
    thoughts = part_answer(text, call, is_opened=is_opened).thoughts
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
    return replace(parsed, prose=prose)


def opens_thought(renderer: Renderer, token_ids: list[int]) -> bool:
    """Whether a prompt ends within a thought: the header of the answer opens one."""
    size = renderer.header_size(token_ids)
    tail = token_ids[-_MAX_HEADER_TOKENS:]
    if not size and renderer.end_id in tail:
        size = tail[::-1].index(renderer.end_id)
    header = renderer.decode(token_ids[len(token_ids) - size :])
    return _LEFT_OPEN.search(header) is not None
