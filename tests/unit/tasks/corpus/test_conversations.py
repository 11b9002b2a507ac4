"""A user's own conversations: answers alone are learned, token for token what an engine would sample."""

import json
from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.models.rendering.chat_template import TemplateRenderer
from ostinato.tasks.corpus.chat_rows import read_conversations
from ostinato.tasks.corpus.conversations import make_documents
from tests.fakes.published_model import TEMPLATE, small_tokenizer

SETTINGS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
RENDERERS = {
    "own tokens": Renderer(train_tokenizer(["def add(a, b): return a"], vocab_size=450)),
    "published template": TemplateRenderer(small_tokenizer(), TEMPLATE, SETTINGS),
}
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 7?"},
    {"role": "assistant", "content": "Let me see."},
    {"role": "tool", "content": "12"},
    {"role": "tool", "content": "again 12"},
    {"role": "assistant", "content": "12 <|im_end|> it is"},
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


@pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS)
def test_answers_alone_are_learned(renderer: Renderer, tmp_path: Path) -> None:
    path = write(tmp_path / "told.jsonl", {"messages": MESSAGES, "id": 1})
    (document,) = make_documents(read_conversations(path), renderer, HarnessConfig())
    assert len(document.token_ids) == len(document.loss_mask)
    learned: list[list[int]] = [[]]
    for token, is_learned in zip(document.token_ids, document.loss_mask, strict=True):
        if is_learned:
            learned[-1].append(token)
        elif learned[-1]:
            learned.append([])
    answers = [message["content"] for message in MESSAGES if message["role"] == "assistant"]
    assert [ids[-1] for ids in learned] == [renderer.end_id] * 3
    assert [renderer.decode(ids[:-1]) for ids in learned] == answers
    # what a client of an engine would have sent before the second answer
    opened = renderer.start("What is 2 + 3?", "Be short.")
    first = [*renderer.encode_content("5"), renderer.end_id]
    history = [*opened, *first, *renderer.append_user("And 7?")]
    assert list(document.token_ids[: len(history)]) == history


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (MESSAGES[1:2], "messages: Tuple should have at least 2 items"),
        (MESSAGES[:2], "the last message is by 'user', wanted 'assistant'"),
        (MESSAGES[2:4], "message 0 is by 'assistant' after 'nothing', wanted system or user"),
        ([MESSAGES[1], MESSAGES[1]], "message 1 is by 'user' after 'user', wanted assistant"),
        ([MESSAGES[1], {"role": "assistant", "content": None}], "messages.1: content is null"),
        ([{"role": "bot", "content": "x"}, MESSAGES[2]], "messages.0.role: "),
    ],
)
def test_wrong_turn_is_named(messages: list, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "told.jsonl", {"messages": MESSAGES}, {"messages": messages})
    with pytest.raises(ConfigError, match=r"told\.jsonl, row 2: ") as caught:
        read_conversations(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("told.jsonl", b"", "holds no conversation"),
        ("told.jsonl", b"{", "row 1 is not JSON"),
        ("told.jsonl", b"[1]", "row 1: no field messages"),
        ("told.jsonl", b'{"messages": "caf\xe9"}', "row 1 is not JSON: 'utf-8' codec can't decode"),
        ("told.jsonl", b"[" * 100_000, "row 1 is nested 100000 levels deep"),
        ("told.csv", b"a", "ends in '.csv', wanted .jsonl or .parquet"),
    ],
)
def test_wrong_file_is_named(name: str, text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=says):
        read_conversations(tmp_path / name)
    with pytest.raises(ConfigError, match="does not exist"):
        read_conversations(tmp_path / "none.jsonl")
