"""The chat and tool template: conversations to tokens and back.

The template only appends: a conversation's tokens are `start(...)`, then the model's own sampled
tokens, then `append_results(...)` or `append_user(...)`, and so on. Sampled tokens are never
encoded again. Content never yields a control token, whatever it contains.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from ostinato.models.rendering.control_texts import encode_text
from ostinato.models.rendering.vocabulary import (
    ASSISTANT,
    CALL_TAGS,
    CONTROL_TOKENS,
    END,
    END_OF_TEXT,
    LINE_TAGS,
    PAD,
    SPECIAL_IDS,
    SPECIAL_TOKENS,
    SYSTEM,
    TOOL,
    USER,
)

if TYPE_CHECKING:  # the module imports Jinja, which our own form does not need
    from ostinato.models.rendering.call_results import NamedCall

Tags = Literal["none", "lines", "all"]
TOKENIZER_FILE = "tokenizer.json"


def _tag_pattern(tags: Iterable[str]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(re.escape(tag) for tag in tags) + ")")


_PATTERNS = {"lines": _tag_pattern(LINE_TAGS), "all": _tag_pattern((*CALL_TAGS, *LINE_TAGS))}


class Renderer:
    """Turns messages into tokens and tokens into text for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        for token, index in SPECIAL_IDS.items():
            found = tokenizer.token_to_id(token)
            if found != index:
                raise ValueError(f"tokenizer has {token} at id {found}, wanted {index}")
        self.tokenizer = tokenizer
        # Makes the tokenizer treat special tokens in contents as plain text.
        tokenizer.encode_special_tokens = True
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.pad_id = SPECIAL_IDS[PAD]
        self.end_of_text_id = SPECIAL_IDS[END_OF_TEXT]
        self.end_id = SPECIAL_IDS[END]
        self.assistant_id = SPECIAL_IDS[ASSISTANT]
        self.stop_token_ids: tuple[int, ...] = (self.end_id, self.end_of_text_id)

    @classmethod
    def load(cls, path: Path) -> "Renderer":
        """Reads `tokenizer.json`. `path` is the file or the directory that holds it."""
        file = path / TOKENIZER_FILE if path.is_dir() else path
        return cls(Tokenizer.from_file(str(file)))

    def save(self, directory: Path) -> Path:
        """Writes `tokenizer.json` into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / TOKENIZER_FILE
        self.tokenizer.save(str(path))
        return path

    def encode_content(self, text: str, tags: Tags = "none") -> list[int]:
        """Tokens of `text`. "lines" makes line tags single tokens, "all" also call tags."""
        if tags == "none" or "<" not in text:
            return encode_text(self.tokenizer, text)
        ids: list[int] = []
        for index, piece in enumerate(_PATTERNS[tags].split(text)):
            if index % 2:
                ids.append(SPECIAL_IDS[piece])
            elif piece:
                ids.extend(encode_text(self.tokenizer, piece))
        return ids

    def encode_answer(self, text: str) -> list[int]:
        """Tokens of an answer as the model would sample it, including the closing token."""
        return [*self.encode_content(text, tags="all"), self.end_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, with special tokens by name. Bytes that are not UTF-8 become U+FFFD."""
        table = self._token_bytes
        spelled = [table[token_id] for token_id in token_ids if token_id < len(table)]
        return b"".join(spelled).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text, which may end inside a character. Empty for a
        padding id of the model's vocabulary, which the tokenizer lacks.
        """
        table = self._token_bytes
        return table[token_id] if token_id < len(table) else b""

    def is_control(self, token_id: int) -> bool:
        """Whether a token belongs to the conversation's form and never occurs in contents."""
        return token_id < len(CONTROL_TOKENS)

    @property
    def states_functions(self) -> bool:
        """Whether `start` states tools. Our own form does not, since its models are trained on them."""
        return False

    def start(
        self, user: str, system: str | None = None, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens that open a conversation: system message if any, user's message, the answer's
        header. `tools`: schemas, for forms that state them.
        """
        ids: list[int] = []
        if system is not None:
            ids += [SPECIAL_IDS[SYSTEM], *self.encode_content(system), self.end_id]
        return ids + self.append_user(user)

    def append_user(self, text: str) -> list[int]:
        """Tokens of a further user message and the header of the answer to it."""
        return [SPECIAL_IDS[USER], *self.encode_content(text), self.end_id, self.assistant_id]

    def append_results(
        self, results: Sequence[str], note: str | None = None, calls: "Sequence[NamedCall]" = ()
    ) -> list[int]:
        """Tokens of a turn's tool results in call order, a note of the harness if any, and the
        header of the next answer. The note is a system message, which no result can imitate.
        `calls`: the answered calls, for forms that name them with their results.
        """
        ids: list[int] = []
        for result in results:
            ids += [SPECIAL_IDS[TOOL], *self.encode_content(result, tags="lines"), self.end_id]
        if note is not None:
            ids += [SPECIAL_IDS[SYSTEM], *self.encode_content(note), self.end_id]
        ids.append(self.assistant_id)
        return ids

    def header_size(self, token_ids: Sequence[int]) -> int:
        """Number of tokens at the end of `token_ids` that are the answer's header. If no answer was
        sampled, a further message replaces them.
        """
        size = len(self._header_ids)
        return size if list(token_ids[len(token_ids) - size :]) == self._header_ids else 0

    @property
    def _header_ids(self) -> list[int]:
        return [self.assistant_id]

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        byte_of = {character: value for value, character in byte_characters().items()}
        table = [token.encode() for token in SPECIAL_TOKENS]
        for token_id in range(len(SPECIAL_TOKENS), self.vocab_size):
            token = self.tokenizer.id_to_token(token_id)
            assert token is not None
            table.append(bytes(byte_of[character] for character in token))
        return table


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {value: chr(value) for value in printable}
    others = [value for value in range(256) if value not in characters]
    characters.update({value: chr(256 + index) for index, value in enumerate(others)})
    assert set(characters.values()) == set(ByteLevel.alphabet())
    return characters
