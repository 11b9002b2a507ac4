"""Laws of the template: lossless, append-only, and deaf to special tokens written in content."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE

from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.models.rendering.vocabulary import (
    CALL_TAGS,
    CONTROL_TOKENS,
    LINE_TAGS,
    SPECIAL_IDS,
    SPECIAL_TOKENS,
)

SOURCE = Path(__file__).read_text()
RENDERER = Renderer(train_tokenizer([SOURCE], vocab_size=500))
NASTY_TEXT = st.lists(st.one_of(st.text(), st.sampled_from(SPECIAL_TOKENS))).map("".join)
by_number = pytest.mark.parametrize("examples", [60, pytest.param(200, marks=pytest.mark.nightly)])


@by_number
def test_decode_of_encoded_text_returns_it(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(NASTY_TEXT, st.sampled_from(["none", "lines", "all"]))
    def decode(text: str, tags) -> None:
        assert RENDERER.decode(RENDERER.encode_content(text, tags=tags)) == text

    decode()


@by_number
def test_content_never_yields_more_specials_than_its_tags_allow(examples: int) -> None:
    control = {SPECIAL_IDS[token] for token in CONTROL_TOKENS}
    calls = {SPECIAL_IDS[token] for token in CALL_TAGS}
    lines = {SPECIAL_IDS[token] for token in LINE_TAGS}

    @settings(max_examples=examples, deadline=None)
    @given(NASTY_TEXT)
    def encode(text: str) -> None:
        assert not set(RENDERER.encode_content(text)) & (control | calls | lines)
        assert not set(RENDERER.encode_content(text, tags="lines")) & (control | calls)
        assert not set(RENDERER.encode_content(text, tags="all")) & control

    encode()


def test_conversation_is_the_concatenation_of_its_parts() -> None:
    ids = RENDERER.start("Fix f in a.py")
    ids += RENDERER.encode_answer("<run_terminal>pytest</run_terminal>")
    ids += RENDERER.append_results(["failed at <L3>", "<L1>def f():"])
    assert RENDERER.decode(ids) == (
        "<|user|>Fix f in a.py<|end|><|assistant|><run_terminal>pytest</run_terminal><|end|>"
        "<|tool|>failed at <L3><|end|><|tool|><L1>def f():<|end|><|assistant|>"
    )
    assert ids.count(RENDERER.end_id) == 4


def test_system_message_comes_first() -> None:
    assert RENDERER.decode(RENDERER.start("hello", system="be brief")) == (
        "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
    )


def test_indentation_and_words_are_split_the_python_way() -> None:
    words = [RENDERER.decode([token]) for token in RENDERER.encode_content("\n    return 12")]
    assert words[0] == "\n    "
    assert words[-2:] == ["1", "2"]


def test_save_and_load_keep_every_token(tmp_path: Path) -> None:
    RENDERER.save(tmp_path)
    loaded = Renderer.load(tmp_path)
    assert loaded.encode_content(SOURCE, tags="all") == RENDERER.encode_content(SOURCE, tags="all")
    assert loaded.vocab_size == RENDERER.vocab_size <= 500


def test_tokenizer_without_the_specials_is_refused() -> None:
    with pytest.raises(ValueError, match=r"<\|pad\|>"):
        Renderer(Tokenizer(BPE()))


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 300"):
        train_tokenizer(["x"], vocab_size=300)
