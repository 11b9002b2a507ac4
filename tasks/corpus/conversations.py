"""Conversations of a user's own, as documents to fine-tune on: the answers are learned, the rest is read.

A file is JSON lines or parquet (with pyarrow installed). A row has `messages`, each with `role` and
`content`: a system message if any, then user and assistant in turn; tool results follow an answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.row_files import read_rows
from ostinato.models.rendering import Renderer
from ostinato.tasks.corpus.repairs.transcripts import Document

FOLLOWS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


class Message(Record):
    """Words of one side."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Conversation(Record):
    """Messages in order. The last is an answer."""

    messages: tuple[Message, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _in_turn(self) -> "Conversation":
        before = None
        for index, message in enumerate(self.messages):
            if message.role not in FOLLOWS[before]:
                raise ValueError(
                    f"message {index} is by {message.role!r} after {before or 'nothing'!r}, wanted "
                    f"{' or '.join(FOLLOWS[before])}"
                )
            before = message.role
        if before != "assistant":
            raise ValueError(f"the last message is by {before!r}, wanted 'assistant'")
        return self


def read_conversations(path: Path) -> list[Conversation]:
    """All of a file. ConfigError names row, field, value seen and value wanted."""
    found = []
    for number, row in read_rows(path, (".jsonl", ".parquet"), ("messages",)):
        if not isinstance(row, dict) or "messages" not in row:
            raise ConfigError(f"{path}, row {number}: no field messages, wanted a list of messages")
        try:
            found.append(Conversation.model_validate({"messages": row["messages"]}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "messages"
            says = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{path}, row {number}: {place}: {says}") from None
    if not found:
        raise ConfigError(f"{path} holds no conversation, wanted one or more rows with messages")
    return found


def make_documents(conversations: Sequence[Conversation], renderer: Renderer) -> list[Document]:
    """Token ids and loss masks: tokens of answers and the token that ends each are learned."""
    return [_make_document(item, renderer) for item in conversations]


def _make_document(conversation: Conversation, renderer: Renderer) -> Document:
    messages = list(conversation.messages)
    system = messages.pop(0).content if messages[0].role == "system" else None
    ids = renderer.start(messages.pop(0).content, system)
    mask = [False] * len(ids)
    results: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            added = [*renderer.encode_content(message.content), renderer.end_id]
        elif message.role == "user":
            added = renderer.append_user(message.content)
        else:
            results.append(message.content)
            if messages[index + 1].role == "tool":
                continue
            added, results = renderer.append_results(results), []
        ids += added
        mask += [message.role == "assistant"] * len(added)
    return Document(ids, mask)
