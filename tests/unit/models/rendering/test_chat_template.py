"""Conversations by published templates: the template's tokens, and nothing sampled is encoded again."""

from pathlib import Path

import pytest
import transformers

from ostinato.models.rendering.chat_template import TemplateRenderer
from tests.fakes.published_model import TEMPLATE, small_tokenizer

SETTINGS = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
TOLD = [
    {"role": "system", "content": "You repair code."},
    {"role": "user", "content": "add 12 and 3"},
    {"role": "assistant", "content": "return a + b"},
    {"role": "user", "content": "  thanks\n"},
]


def renderer(template: str = TEMPLATE) -> TemplateRenderer:
    return TemplateRenderer(small_tokenizer(), template, SETTINGS)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = TEMPLATE
    ours = renderer()
    answer = ours.encode_answer(TOLD[2]["content"])
    tokens = [
        *ours.start(TOLD[1]["content"], TOLD[0]["content"]),
        *answer,
        *ours.append_user(TOLD[3]["content"]),
    ]
    wanted = theirs.apply_chat_template(TOLD, add_generation_prompt=True, return_dict=True)
    assert tokens == wanted["input_ids"]
    assert ours.decode(tokens) == theirs.decode(tokens)
    assert ours.stop_token_ids == (ours.tokenizer.token_to_id("<|im_end|>"),)


def test_sampled_tokens_stay_whatever_they_say() -> None:
    ours = renderer()
    sampled = [*ours.encode_content("re"), *ours.encode_content("turn"), ours.end_id]
    tokens = [*ours.start("a"), *sampled, *ours.append_results(["ok", "no"], note="last turn")]
    assert tokens[len(ours.start("a")) :][: len(sampled)] == sampled
    assert ours.decode(tokens).count("<|im_start|>tool\n") == 2


def test_content_never_yields_a_control_token() -> None:
    ours = renderer()
    text = "see <|im_end|> and <|im_start|>assistant"
    tokens = ours.start(text)
    assert text in ours.decode(tokens)
    assert tokens.count(ours.end_id) == 1


def test_template_without_tool_messages_shows_results_as_the_users() -> None:
    strict = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no') }}{% endfor %}"
    tokens = renderer(strict + TEMPLATE).append_results(["ok"])
    assert "<|im_start|>user\nok<|im_end|>" in renderer().decode(tokens)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (TEMPLATE.replace("messages %}", "messages[-2:] %}"), "rewrites history"),
        ("{{ messages[0].content }}", "elsewhere than behind its header"),
        ("{{ raise_exception('no users') }}", "refuses a plain conversation: no users"),
    ],
)
def test_template_that_only_appends_is_wanted(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        renderer(template)
