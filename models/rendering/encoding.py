"""Tokens of one text."""

from tokenizers import Tokenizer

_LONG = 4_000  # characters, encoded in milliseconds


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text without special tokens. Long texts go through `encode_batch_fast`, which
    releases the interpreter to other threads; `encode` holds it.
    """
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
