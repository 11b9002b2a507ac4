"""Models that bring SentencePiece's `tokenizer.model` alone: converted, chatted with, exported."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import sentencepiece
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.rendering.chat_template import TemplateRenderer
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.corpus.conversations import render_whole
from tests.fakes.published_model import write_published_model

TOLD = [
    {"role": "user", "content": "add 12 </s> é ☃"},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
    {"role": "user", "content": "  thanks"},
    {"role": "assistant", "content": "ok </s>"},
]


def write_model(directory: Path) -> Path:
    """A Llama 2 in small: pieces with a mark for spaces, single bytes for the rest."""
    write_published_model(directory, vocab_size=330, bos_token_id=1, eos_token_id=2)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", '
        '"unk_token": "<unk>", "add_bos_token": true}'
    )
    lines = ["def add(a, b):", "    return a + b", "print(1 + 2)", "for x in range(10):"] * 50
    (directory / "lines.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "lines.txt"),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return directory


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def base(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("imported")
    facts = import_model(str(published), directory / "base", directory / "cache")
    assert facts["chat_template"] == "plain, the model came without one"
    return directory / "base"


def prepend_everywhere(tokenizer_file: Path) -> None:
    """As the tokenizer.json that Llama 2 came with: a space before each text between special tokens."""
    described = json.loads(tokenizer_file.read_text())
    described["pre_tokenizer"] = None
    described["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    tokenizer_file.write_text(json.dumps(described))


@pytest.mark.parametrize("is_older", [False, True])
def test_conversations_are_those_of_transformers(
    is_older: bool, base: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(base, tmp_path / "base"))
    if is_older:
        prepend_everywhere(base / "tokenizer.json")
    export_model(base, tmp_path / "out", name="x", lineage=[], dtype=None)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "out" / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    theirs.chat_template = (tmp_path / "out" / "chat_template.jinja").read_text()
    ours = TemplateRenderer.load(base)
    if not is_older:
        exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert exported("a  b").input_ids == theirs("a  b").input_ids
    plain = [message | {"content": message["content"].replace("</s>", "")} for message in TOLD]
    wanted = theirs.apply_chat_template(plain, return_dict=True)["input_ids"]
    parts = render_whole(ours, plain)
    tokens = [token for ids, _ in parts for token in ids]
    assert tokens == wanted[: len(tokens)]
    grown = [
        *ours.start(plain[0]["content"]),
        *ours.encode_answer(plain[1]["content"]),
        *ours.append_user(plain[2]["content"]),
    ]
    assert grown == tokens[: len(grown)]


def test_contents_keep_their_text_and_steer_nothing(base: Path) -> None:
    ours = TemplateRenderer.load(base)
    tokens = [token for ids, _ in render_whole(ours, TOLD) for token in ids]
    assert tokens.count(ours.end_id) == 2
    assert ours.decode(tokens).count("</s>") == 4

    @given(st.text(max_size=12) | st.sampled_from(["<0x41>", "▁".join("ab"), " </s><s>"]))
    def text_stays(text: str) -> None:
        ids = ours.encode_content(text)
        assert ours.decode(ids) == text.replace("▁", " ")  # SentencePiece's mark is a space to it
        assert not any(ours.is_control(token) for token in ids)

    text_stays()


def test_what_is_no_sentencepiece_model_is_refused(published: Path, tmp_path: Path) -> None:
    write_published_model(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").unlink()
    (tmp_path / "in" / "tokenizer.model").write_bytes(b"version https://git-lfs")
    with pytest.raises(ConfigError, match=r"tokenizer\.model cannot be read; wanted a Sentence"):
        import_model(str(tmp_path / "in"), tmp_path / "base", tmp_path / "cache")


def test_without_the_library_the_fix_is_named(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "ostinato.tasks.conversion.sentencepiece_file", raising=False)
    with pytest.raises(
        ConfigError, match=r"sentencepiece is not installed; .*'ostinato\[models\]'"
    ):
        import_model(str(published), tmp_path / "base", tmp_path / "cache")
