"""Calls by which the demonstrator finds a function that the prompt only describes: one code search,
or a few greps for words of the description. Only attempts that find the function are kept.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from ostinato.infra.agent.dialects.compact.places import find_place
from ostinato.tasks.corpus.config import Locating

LocatingCalls = Generator[str, str, str | None]
"""Yields calls, is sent results, returns the place to read, or None if no result showed it."""
MAX_GREPS = 3
_WORD = re.compile(r"[a-zA-Z]{3,}")
_DULL = frozenset(
    _WORD.findall(
        "the and for with that this its not are was will has have from into each any all only one"
        " than when using which given like same other return returns except instead function"
        " method value values"
    )
)


def locate(way: Locating, description: str, path: str, symbol: str) -> LocatingCalls:
    """Yields a call, is sent its result, returns the argument of read_file for the function.

    A space precedes the query as in the prompt, so that both have the same tokens, which a small
    model can copy. A verbose pattern, (?x), ignores the space.
    """
    if way == "search":
        result = yield f"<codebase_search> {description}</codebase_search>"
        return find_place(result, path, symbol)
    for word in choose_words(description)[:MAX_GREPS]:
        result = yield f"<grep>(?xi)^def\\s.* {word}</grep>"
        place = find_place(result, path, symbol)
        if place is not None:
            return place
    return None


def choose_words(description: str) -> list[str]:
    """Distinctive words for grep, in the order of the sentence."""
    words: dict[str, str] = {}
    for word in _WORD.findall(description):
        words.setdefault(word.lower(), word)
    return [word for low, word in words.items() if low not in _DULL]


@dataclass(frozen=True, slots=True)
class Located:
    """Calls that found a function with their results, and the argument of read_file."""

    steps: Sequence[tuple[str, str]]
    place: str


def drive(calls: LocatingCalls, answer: Callable[[str], str]) -> Located | None:
    """Runs the calls. None if they did not find the function."""
    steps: list[tuple[str, str]] = []
    try:
        call = next(calls)
        while True:
            steps.append((call, answer(call)))
            call = calls.send(steps[-1][1])
    except StopIteration as end:
        return None if end.value is None else Located(steps, end.value)
