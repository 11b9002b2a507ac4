"""How the demonstrator finds a function that the prompt only describes.

Owns the two ways of the search ablation: one question to code search, or a few greps for words of
the description in names of functions. Enters: the description and what the tools say. Leaves: calls
one at a time, and whether the function stood in a result. A way that does not find it is not
demonstrated: what is kept are attempts in which locating succeeded.
"""

import re
from collections.abc import Callable, Generator
from typing import Literal

Locating = Literal["named", "search", "grep"]
"""named: the prompt names the function, nothing is located."""
LocatingTalk = Generator[str, str, bool]
MAX_GREPS = 3
_WORD = re.compile(r"[a-z]{3,}")
_DULL = frozenset(
    _WORD.findall(
        "the and for with that this its not are was will has have from into each any all only one"
        " than when using which given like same other return returns except instead function"
        " method value values"
    )
)


def locate(way: Locating, description: str, path: str, symbol: str) -> LocatingTalk:
    """Yields a call, is sent its result, returns whether the function was shown."""
    if way == "search":
        result = yield f"<codebase_search>{description}</codebase_search>"
        return shows_function(result, path, symbol)
    for word in choose_words(description)[:MAX_GREPS]:
        result = yield f"<grep>^def .*{word}</grep>"
        if shows_function(result, path, symbol):
            return True
    return False


def choose_words(description: str) -> list[str]:
    """Words worth a grep, in the order of the sentence."""
    words = dict.fromkeys(_WORD.findall(description.lower()))
    return [word for word in words if word not in _DULL]


def shows_function(result: str, path: str, symbol: str) -> bool:
    """Whether a line of a search result or of a grep is where the function begins."""
    place = rf"^{re.escape(path)}:\d+(?:-\d+ |:)\s*(?:async )?def {re.escape(symbol)}\("
    return re.search(place, result, re.MULTILINE) is not None


def drive(talk: LocatingTalk, answer: Callable[[str], str]) -> list[tuple[str, str]] | None:
    """Calls and results of a whole talk; None when it did not find the function."""
    steps: list[tuple[str, str]] = []
    try:
        call = next(talk)
        while True:
            steps.append((call, answer(call)))
            call = talk.send(steps[-1][1])
    except StopIteration as end:
        return steps if end.value else None
