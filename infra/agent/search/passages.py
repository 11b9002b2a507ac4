"""Cuts files into passages and passages into terms.

Text in; passages (line ranges with their terms) out, cached by content. Identifiers count whole and
in their parts: `firstTrue` and `first_true` both hold `first` and `true`. It ranks nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

WINDOW_LINES = 30
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_DEFINITION = re.compile(r"^(?:async\s+def|def|class)\s")


@dataclass(frozen=True, slots=True)
class Passage:
    """Lines first_line..last_line (1-based) of a file."""

    first_line: int
    last_line: int
    title: str  # its first line that says something
    terms: Mapping[str, int]
    num_terms: int


def split_terms(text: str) -> list[str]:
    """Lower-case words of `text` and the parts of compound identifiers."""
    terms: list[str] = []
    for word in _WORD.findall(text):
        whole = word.lower()
        terms.append(whole)
        parts = _PART.findall(word)
        if len(parts) > 1 or (parts and parts[0].lower() != whole):
            terms.extend(part.lower() for part in parts)
    return terms


@lru_cache(maxsize=4096)
def split_passages(text: str) -> tuple[Passage, ...]:
    """Top-level definitions of a file. Long ones and the rest in windows of WINDOW_LINES."""
    lines = text.split("\n")
    passages: list[Passage] = []
    start = 0
    for index in range(1, len(lines) + 1):
        is_full = index - start >= WINDOW_LINES
        if index == len(lines) or is_full or _DEFINITION.match(lines[index]):
            passage = _make_passage(lines, start, index)
            if passage is not None:
                passages.append(passage)
            start = index
    return tuple(passages)


def _make_passage(lines: list[str], start: int, end: int) -> Passage | None:
    said = [index for index in range(start, end) if lines[index].strip()]
    if not said:
        return None
    terms = split_terms("\n".join(lines[start:end]))
    title = lines[said[0]].strip()[:80]
    return Passage(said[0] + 1, said[-1] + 1, title, Counter(terms), len(terms))
