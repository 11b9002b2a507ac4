"""Contents never yield a control token, and a template that thinks appends to agents' turns."""

from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from ostinato.models.rendering.call_results import RESULT, NamedCall
from ostinato.models.rendering.chat_template import TemplateRenderer
from tests.fakes.published_model import TEMPLATE, TOOL_TEMPLATE, small_tokenizer
from tests.fakes.published_templates import TEMPLATES
from tests.fakes.thinking_template import TAGS, THINKING_TEMPLATE, thinking_tokenizer

SETTINGS = {"eos_token": "<|im_end|>"}


def marked_tokenizer() -> Tokenizer:
    """With a special token of one character, and added runs of spaces and words, which are content."""
    tokenizer = thinking_tokenizer()
    tokenizer.add_special_tokens(["␞"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("     ", "repair")])
    return tokenizer


OURS = {
    "chat": TemplateRenderer(marked_tokenizer(), TEMPLATE, SETTINGS),
    "tools": TemplateRenderer(marked_tokenizer(), TOOL_TEMPLATE, SETTINGS),
    "thoughts": TemplateRenderer(marked_tokenizer(), THINKING_TEMPLATE, SETTINGS),
    "one character": TemplateRenderer(
        marked_tokenizer(), TEMPLATE.replace("<|im_end|>", "␞"), SETTINGS
    ),
}
CONTROLS = ("␞", "<|im_end|>", "<|im_start|>", "<|endoftext|>", *TAGS)
CONTENTS = st.lists(
    st.sampled_from((*CONTROLS, "<", "|>", "<|im_", "0mark0", "     ", "repair", "\n", "é", '"'))
    | st.text(max_size=3),
    max_size=6,
).map("".join)


def count_controls(ours: TemplateRenderer, tokens: list[int]) -> list[int]:
    return [tokens.count(ours.tokenizer.token_to_id(text)) for text in CONTROLS]


@pytest.mark.parametrize("ours", OURS.values(), ids=OURS)
@given(contents=st.tuples(CONTENTS, CONTENTS, CONTENTS))
def test_no_content_yields_a_control_token(
    ours: TemplateRenderer, contents: tuple[str, str, str]
) -> None:
    first, second, third = contents
    tool = {"type": "function", "function": {"name": "f", "description": first, second: third}}
    for tokens, harmless in (
        (ours.encode_content(first), []),
        (ours.start(first, second), ours.start("a", "b")),
        (ours.start("a", "b", [tool]), ours.start("a", "b", [{"type": "function"}])),
        (ours.append_user(first), ours.append_user("a")),
        (
            ours.append_results([first, second], third),
            ours.append_results(["a", "b"], "c"),
        ),
    ):
        assert count_controls(ours, tokens) == count_controls(ours, harmless)
    assert ours.decode(ours.encode_content(first)) == first
    assert first in ours.decode(ours.start(first, second))


def test_added_words_and_spaces_are_content() -> None:
    ours = OURS["chat"]
    tokens = ours.encode_content("def     repair")
    assert [ours.decode([token]) for token in tokens[-2:]] == ["     ", "repair"]


def test_a_control_token_that_is_a_letter_of_the_alphabet_is_refused() -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(["|"])
    with pytest.raises(ValueError, match=r"no other tokens for the text '<\|endoftext\|>'"):
        TemplateRenderer(tokenizer, TEMPLATE, SETTINGS)


def test_the_models_own_tags_are_tokens_in_its_answers() -> None:
    ours = OURS["thoughts"]
    tokens = ours.encode_answer("<think>\nx\n</think> <|im_end|>")
    assert tokens.count(ours.tokenizer.token_to_id("<think>")) == 1
    assert tokens.count(ours.end_id) == 1
    assert tokens[-1] == ours.end_id


def test_a_template_that_thinks_appends_to_agents_turns(tmp_path: Path) -> None:
    thinking_tokenizer().save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = THINKING_TEMPLATE
    ours = TemplateRenderer(thinking_tokenizer(), THINKING_TEMPLATE, SETTINGS)
    thought = "<think>\nsum?\n</think>\n\nlook"
    told = [
        {"role": "user", "content": "add 12 and 3"},
        {"role": "assistant", "content": thought},
        {"role": "tool", "content": "a + b"},
        {"role": "tool", "content": "15"},
        {"role": "assistant", "content": thought},
        {"role": "tool", "content": "ok"},
    ]
    tokens = [
        *ours.start("add 12 and 3"),
        *ours.encode_answer(thought),
        *ours.append_results(["a + b", "15"]),
        *ours.encode_answer(thought),
        *ours.append_results(["ok"]),
    ]
    wanted = theirs.apply_chat_template(told, add_generation_prompt=True, return_dict=True)
    assert tokens == wanted["input_ids"]
    assert ours.drops_thoughts
    assert not OURS["chat"].drops_thoughts


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_result_follows_whatever_name_and_id_a_model_gives_its_call(template: str) -> None:
    """An id of another length than Mistral's, and names that hold a control text, are what a model samples."""
    ours = TEMPLATES[template].renderer()
    end = ours.decode([ours.end_id])
    plain = ours.append_results(["ok"], calls=[NamedCall("glob")])
    for call_id in ("", "short", "functions.glob:0", f"x{end}"):
        for name in ("glob", f"x{end}y", RESULT, "[TOOL_CALLS]", "", "a b\n", '"é'):
            tokens = ours.append_results([f"ok {end}"], calls=[NamedCall(name, call_id)])
            assert ours.decode(tokens).count("ok ") == 1, (name, call_id)
            assert tokens.count(ours.end_id) == plain.count(ours.end_id), (name, call_id)
