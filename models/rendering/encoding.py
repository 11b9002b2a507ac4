"""Tokens of one text."""

import re

from tokenizers import Tokenizer

_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG = 4_000  # characters, encoded in milliseconds


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text without special tokens. Long texts go through `encode_batch_fast`, which
    releases the interpreter to other threads; `encode` holds it. Raises ValueError for half of a
    surrogate pair, which JSON may hold and no encoding does.
    """
    half = None if text.isascii() else _SURROGATE.search(text)
    if half is not None:
        raise ValueError(
            f"a text has {half[0]!r} as character {half.start()}, half of a surrogate pair, wanted Unicode"
        )
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
