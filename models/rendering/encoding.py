"""Tokens of one text."""

from tokenizers import Tokenizer

_LONG = 4_000  # characters, encoded in milliseconds


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text without special tokens. Other threads run while a long one is encoded: alone
    `encode` keeps the interpreter to itself.
    """
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
