"""Control tokens, which only a conversation's form may contain, and encoding without them.

Control tokens are the special tokens, and added tokens with punctuation (`<tool_call>`, `<think>`).
Added words and runs of white space count as ordinary text.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

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


MARK = "0mark0"  # survives a template's JSON encoding and trimming of contents


class ControlTexts:
    """The control tokens of a tokenizer, by their texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or _has_punctuation(token.content)
        }
        special = [token.content for token in added.values() if token.special]
        self._any = _pattern(self._ids)
        self._special = _pattern(special)
        self._spoken = _pattern(self._ids.keys() - set(special))
        self._plain = _without(tokenizer, self._ids.keys())
        self._controls = set(self._ids.values())
        for text in self._ids:
            if not self._controls.isdisjoint(self.encode_content(text)):
                raise ValueError(
                    f"the tokenizer has no other tokens for the text {text!r} than a control token, "
                    "wanted other tokens for contents with this text"
                )

    def is_control(self, token_id: int) -> bool:
        """Whether a token is a control token."""
        return token_id in self._controls

    def find(self, text: str) -> str | None:
        """The first control text in `text`."""
        found = self._any.search(text)
        return None if found is None else found[0]

    def encode_content(self, text: str) -> list[int]:
        """Tokens of `text` without control tokens."""
        return encode_text(self._plain, text)

    def encode_answer(self, text: str) -> list[int]:
        """Tokens of a model's answer, which may contain control tokens but no special tokens."""
        ids: list[int] = []
        for index, piece in enumerate(self._spoken.split(text)):
            ids += [self._ids[piece]] if index % 2 else self.encode_content(piece)
        return ids

    def encode_later(self, text: str, mark: str | None) -> list[int]:
        """Tokens of a later part of a template's text, which does not begin at its start."""
        free = f"(?<!{mark})" if mark else ""
        found = re.search(free + self._any.pattern, text)
        begin = len(text) if found is None else found.start()
        head = text[:begin].replace(mark, "") if mark else text[:begin]
        return self.encode_content(head) + self.encode_form(text[begin:], mark)

    def encode_form(self, text: str, mark: str | None = None) -> list[int]:
        """Tokens of a template's text. A control text after `mark` is content, not a control token."""
        if mark is None:
            return encode_text(self._tokenizer, text)
        ids: list[int] = []
        form = ""
        for piece in re.split(f"(?<!{mark}){self._any.pattern}", text):
            if mark in piece:
                ids += self.encode_form(form) + self.encode_content(piece.replace(mark, ""))
                form = ""
            else:
                form += piece
        return ids + self.encode_form(form)

    def mark_contents(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """A message or tool with the mark before each control text. In an answer only special
        tokens' texts are marked.
        """
        texts = self._special if message.get("role") == "assistant" else self._any
        begins = re.compile(f"(?={texts.pattern})")
        return {
            key: value if key == "role" else _map_texts(value, lambda text: begins.sub(mark, text))
            for key, value in message.items()
        }


def choose_mark(text: str) -> str:
    """A mark that `text` does not hold."""
    mark = MARK
    while mark in text:
        mark += MARK
    return mark


def _has_punctuation(text: str) -> bool:
    return any(not (character.isalnum() or character.isspace()) for character in text)


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """A group that matches one of the texts, longest first."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, ordered)) or "(?!)") + ")")


def _without(tokenizer: Tokenizer, texts: Collection[str]) -> Tokenizer:
    """The tokenizer without these added tokens, and without a space before a text, since contents
    begin within a text. All other tokens keep their ids.
    """
    described = json.loads(tokenizer.to_str())
    kept = [token for token in described["added_tokens"] if token["content"] not in texts]
    described["added_tokens"] = kept
    # added tokens that are not in the vocabulary would be renumbered from its end
    described["model"]["vocab"] |= {token["content"]: token["id"] for token in kept}
    described |= {
        part: _without_prefix(described[part]) for part in ("normalizer", "pre_tokenizer")
    }
    return Tokenizer.from_str(json.dumps(described))


def _without_prefix(part: Any) -> Any:
    """A tokenizer step that puts no space before a text. None if the step does nothing else."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            kept = [_without_prefix(step) for step in part[name]]
            return part | {name: [step for step in kept if step is not None]}
    fixed = {"prepend_scheme": "never", "add_prefix_space": False}
    return part | {key: value for key, value in fixed.items() if key in part}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    return value
