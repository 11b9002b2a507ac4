r"""Thoughts in an answer, where no call is looked for.

A thought runs from its opening mark to the next closing one. It also begins with the answer where the
prompt's last words opened it, and where a closing mark comes that nothing opened: then all before the last
such mark is a thought. One that is not closed runs to the end. A mark within a whole call is a part of the
call's arguments, and one between quotes or backticks is only spoken of.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.models.rendering import Renderer

_NAMES = "think|thinking|thoughts?|reason|reasoning|seed:think"
_OPENS = rf"<(?:{_NAMES})>|\[THINK\]|\u25c1think\u25b7|<\|START_THINKING\|>|<\|begin_of_thought\|>"
_CLOSES = rf"</(?:{_NAMES})>|\[/THINK\]|\u25c1/think\u25b7|<\|END_THINKING\|>|<\|end_of_thought\|>"


def _not_quoted(marks: str) -> str:
    return rf"(?<![`'\"])(?:{marks})|(?:{marks})(?![`'\"])"


_CLOSING = re.compile(_not_quoted(_CLOSES))
_FIRST_CHARACTERS = re.compile("[<[{`\u25c1]")  # of marks and calls
_LEFT_OPEN = re.compile(rf"(?:{_OPENS})(?!.*(?:{_CLOSES}))", re.DOTALL)
_MOST_HEADER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Places of an answer's thoughts, and of its first call outside of them."""

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
    """The calls and prose of a text in which thoughts are prose, whatever they hold."""
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
    tail = token_ids[-_MOST_HEADER_TOKENS:]
    if not size and renderer.end_id in tail:
        size = tail[::-1].index(renderer.end_id)
    header = renderer.decode(token_ids[len(token_ids) - size :])
    return _LEFT_OPEN.search(header) is not None
