"""Words of code and prose, and their ids: the input of the code-search encoder.

A word outside the vocabulary gets one of a fixed number of buckets by its hash, so that an unknown
word in a query still matches the same word in code. Imports without torch, since serving uses the
same code as training.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_SHORTEST_PLURAL = 4  # "is", "as" and "has" are no plurals


class CodeText(NamedTuple):
    """A piece of code by fields, since its names say more than its text."""

    scope: str  # path, and names around the definition
    name: str  # the definition's own name; empty outside definitions
    head: str  # its signature; empty outside definitions
    body: str  # path, qualified name and the whole text


FIELDS = CodeText._fields
_HEAD_ENDS = (":", "{")
_MAX_HEAD_LINES = 12


def describe_code(path: str, qualified_name: str, text: str) -> CodeText:
    """The fields of a definition, or of other lines if `qualified_name` is empty."""
    qualifier, _, name = qualified_name.rpartition(".")
    head: list[str] = []
    if name:
        for line in text.split("\n")[:_MAX_HEAD_LINES]:
            head.append(line)
            if line.rstrip().endswith(_HEAD_ENDS):
                break
    return CodeText(
        f"{path} {qualifier}", name, "\n".join(head), f"{path} {qualified_name}\n{text}"
    )


@lru_cache(maxsize=200_000)
def _normal_form(part: str) -> str:
    word = part.lower()
    if len(word) >= _SHORTEST_PLURAL and word[-1] == "s" and word[-2] not in "su":
        return word[:-3] + "y" if word.endswith("ies") else word[:-1]
    return word


def split_words(text: str) -> list[str]:
    """Parts of identifiers and words of prose, lower case, regular plurals folded into singulars."""
    return [_normal_form(part) for part in _PART.findall(text)]


@dataclass(frozen=True, slots=True)
class WordBag:
    """The words of one text: parallel arrays, each id once."""

    ids: np.ndarray  # int64, sorted
    counts: np.ndarray  # float32 [words, fields]; a query only has the last field


class Vocabulary:
    """Known words by id, then buckets for all others."""

    def __init__(self, words: Sequence[str], num_buckets: int) -> None:
        self.words = tuple(words)
        self.num_buckets = num_buckets
        self._ids = {word: index for index, word in enumerate(self.words)}

    @classmethod
    def from_counts(cls, counts: Counter[str], size: int, num_buckets: int) -> "Vocabulary":
        """The `size` words that occur in most texts, and in at least two. Ties in alphabetical order."""
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls([word for word, count in ranked[:size] if count > 1], num_buckets)

    def __len__(self) -> int:
        """Known words and buckets together: rows of an embedding table."""
        return len(self.words) + self.num_buckets

    @property
    def num_known(self) -> int:
        """Ids below this are words. The others are buckets."""
        return len(self.words)

    def id_of(self, word: str) -> int:
        """The word's own id, or its bucket."""
        known = self._ids.get(word)
        return self.bucket_of(word) if known is None else known

    def bucket_of(self, word: str) -> int:
        """The bucket of a word if it were unknown, the same on every machine."""
        return len(self.words) + zlib.crc32(word.encode()) % self.num_buckets

    def bag_of_query(self, text: str) -> WordBag:
        """The words of a question."""
        return self._bag(CodeText("", "", "", text))

    def bag_of_code(self, text: CodeText) -> WordBag:
        """The words of a piece of code by field."""
        return self._bag(text)

    def _bag(self, fields: Iterable[str]) -> WordBag:
        rows: dict[int, list[float]] = {}
        for column, text in enumerate(fields):
            for word, count in Counter(split_words(text)).items():
                row = rows.setdefault(self.id_of(word), [0.0] * len(FIELDS))
                row[column] += count
        ids = np.array(sorted(rows), dtype=np.int64)
        counts = np.array([rows[int(index)] for index in ids], dtype=np.float32)
        return WordBag(ids, counts.reshape(-1, len(FIELDS)))
