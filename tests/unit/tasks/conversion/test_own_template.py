"""The template that exports of our own tokens carry writes the tokens that our renderer encodes, or refuses."""

import json
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from ostinato.infra.serving.gateway.answers.messages import render_messages
from ostinato.infra.serving.gateway.answers.tool_forms import OwnTools
from ostinato.infra.serving.gateway.schemas import ChatMessage
from ostinato.models.rendering import Renderer, load_renderer, train_tokenizer
from ostinato.models.rendering.vocabulary import (
    CONTROL_TOKENS,
    LINE_TAGS,
    SPECIAL_TOKENS,
    TOOL_NAMES,
)
from ostinato.tasks.conversion.exporting import export_model, write_own_template
from tests.fakes.miniature import make_checkpoint

TEXTS = ["def add(a, b):\n    return a + b\n", "<path d='M1 1'/> and <b>"]
OURS = Renderer(train_tokenizer(TEXTS, vocab_size=450))
FORM = OwnTools(OURS, TOOL_NAMES)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerFast:
    directory = OURS.save(tmp_path_factory.mktemp("own"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory))
    tokenizer.chat_template = write_own_template()
    return tokenizer


def ids_of(tokenizer: transformers.PreTrainedTokenizerFast, messages: list[dict]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def call(name: str, **arguments: str) -> dict:
    return {
        "id": "x",
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }


CONVERSATIONS = [
    [{"role": "user", "content": "  fix add()\n"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "fix é"},
        {"role": "assistant", "content": "<read_file>a.py</read_file>"},
        {"role": "tool", "content": "<L1>def add():\n<L2>    pass"},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "Fixed."},
        {"role": "user", "content": "thanks"},
    ],
    [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "Looking. ",
            "tool_calls": [
                call("grep", query="a<b", path="x.py"),
                call("read_file", path="a.py"),
                call("edit_file", path="a.py", lines="<L3>    return 1"),
            ],
        },
        {"role": "tool", "content": "x.py:1: a<b", "tool_call_id": "x"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_transformers_reads_the_tokens_of_our_renderer(
    messages: list[dict], theirs: transformers.PreTrainedTokenizerFast
) -> None:
    said = [ChatMessage.model_validate(_as_sent(message)) for message in messages]
    assert ids_of(theirs, messages) == render_messages(OURS, said, FORM)


def _as_sent(message: dict) -> dict:
    calls = [
        item
        | {"function": item["function"] | {"arguments": json.dumps(item["function"]["arguments"])}}
        for item in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls}


@given(
    contents=st.tuples(
        *[
            st.lists(st.sampled_from((*SPECIAL_TOKENS, "<", "x", "\n", "é")), max_size=4).map(
                "".join
            )
        ]
        * 4
    )
)
def test_contents_are_the_same_tokens_or_refused(contents: tuple[str, ...], theirs: object) -> None:
    assert isinstance(theirs, transformers.PreTrainedTokenizerFast)
    system, user, answer, result = contents
    tokens = [
        *OURS.start(user, system),
        *OURS.encode_answer(answer),
        *OURS.append_results([result]),
    ]
    roles = ("system", "user", "assistant", "tool")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    holds = {
        word
        for role, text in zip(roles, contents, strict=True)
        for word in SPECIAL_TOKENS
        if word in text
        and not (role == "assistant" and word not in CONTROL_TOKENS)
        and not (role == "tool" and word in LINE_TAGS)
    }
    if holds:
        with pytest.raises(TemplateError, match="Ostinato reads it as text"):
            ids_of(theirs, messages)
    else:
        assert ids_of(theirs, messages) == tokens


def test_an_export_of_our_own_carries_the_template(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "made")
    export_model(checkpoint, tmp_path / "out", name="x", lineage=[], dtype=None)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_renderer(checkpoint)
    assert ids_of(exported, CONVERSATIONS[0]) == ours.start("  fix add()\n")
    assert exported.eos_token_id == ours.end_id
