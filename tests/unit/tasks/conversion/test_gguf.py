"""GGUF out: transformers and llama.cpp read from the file what the directory beside it holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFWriter, Keys
from tokenizers import Regex, Tokenizer, pre_tokenizers, trainers

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.gguf_writing import GGUF_FILE, write_gguf
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.llama_cpp import read_with_llama_cpp
from tests.fakes.published_model import (
    SPECIAL,
    TEMPLATE,
    small_tokenizer,
    write_published_model,
)

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = "def add(a, b):\n    return a + b  # 12 and 3 <|im_end|>\n"


def split_as_qwen(directory: Path, pattern: str = QWEN_SPLIT) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def write_qwen3(directory: Path) -> None:
    """Heads wider than hidden size over heads, norms of queries and keys, an untied head; texts split
    as Qwen's are.
    """
    write_published_model(directory)
    split_as_qwen(directory)
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=small_tokenizer().get_vocab_size() + 3,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.Qwen3ForCausalLM._from_config(config).save_pretrained(directory)


def write_qwen3_moe(directory: Path) -> None:
    """Experts of another width than the (unused) dense one."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    widths = {"hidden_size": 160, "num_attention_heads": 10, "num_key_value_heads": 2}
    write_published_model(
        directory, model_type="qwen3_moe", norm_topk_prob=True, **fields, **widths
    )
    split_as_qwen(directory)


def write_qwen2(directory: Path) -> None:
    """Queries, keys and values have biases."""
    write_published_model(directory, model_type="qwen2")
    split_as_qwen(directory)


def write_glm4_moe(directory: Path) -> None:
    """A dense layer first, partly rotated heads with biases and norms, a scaled sigmoid router with a
    correction, two shared experts.
    """
    fields: dict[str, Any] = {
        **{"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
        **{"hidden_size": 160, "num_attention_heads": 10, "num_key_value_heads": 2},
        **{"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    }
    model = write_published_model(directory, model_type="glm4_moe", **fields)
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_()
    model.save_pretrained(directory)
    split_as_qwen(directory)


@pytest.mark.parametrize(
    "write", [write_published_model, write_qwen2, write_qwen3, write_qwen3_moe]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sampled(5)  # each family; 4 would choose two of them
def test_file_holds_what_the_directory_holds(write, dtype, tmp_path: Path) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    write(published)
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    export_model(tmp_path / "checkpoint", out, name="x", lineage=[], dtype=dtype, with_gguf=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    (out / GGUF_FILE).rename(alone / GGUF_FILE)
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(out),
        transformers.AutoTokenizer.from_pretrained(alone, gguf_file=GGUF_FILE),
    ]
    ids = [tokenizer(TEXT)["input_ids"] for tokenizer in tokenizers]
    assert ids[0] == ids[1]
    assert tokenizers[1].chat_template == TEMPLATE
    # transformers undoes llama.cpp's order of rows
    import_model(str(alone / GGUF_FILE), tmp_path / "again", tmp_path / "cache")
    first, again = (load_checkpoint(tmp_path / name) for name in ("checkpoint", "again"))
    assert again.spec.norm_epsilon == pytest.approx(first.spec.norm_epsilon)  # fp32 in the file
    shapes = [loaded.spec.model_copy(update={"norm_epsilon": 0.0}) for loaded in (first, again)]
    assert shapes[0] == shapes[1]
    assert again.weights.keys() == first.weights.keys()
    for name, tensor in first.weights.items():
        assert torch.equal(tensor.to(getattr(torch, dtype)).float(), again.weights[name]), name


@pytest.mark.parametrize(
    "write", [write_published_model, write_qwen2, write_qwen3, write_qwen3_moe, write_glm4_moe]
)
@pytest.mark.sampled(2)
def test_llama_cpp_computes_from_the_file_what_transformers_does_from_the_directory(
    write, tmp_path: Path
) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    write(published)
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    export_model(tmp_path / "checkpoint", out, name="x", lineage=[], dtype=None, with_gguf=True)
    ids, logits_TV = read_with_llama_cpp(out / GGUF_FILE, TEXT)
    assert ids == transformers.AutoTokenizer.from_pretrained(out)(TEXT)["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        wanted_TV = theirs(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_TV, wanted_TV, atol=1e-4, rtol=1e-5)


THREE_DIGITS = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
WHOLE = "eturn"  # stands in the vocabulary, and no merges lead to it


@pytest.mark.parametrize("ignores_merges", [False, True])
def test_whole_words_are_tokens_where_the_tokenizer_says_so(
    ignores_merges: bool, tmp_path: Path
) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    write_published_model(published)
    split_as_qwen(published, THREE_DIGITS)
    described = json.loads((published / "tokenizer.json").read_text())
    model = described["model"]
    last = max(model["vocab"], key=model["vocab"].__getitem__)
    model["vocab"][WHOLE] = model["vocab"].pop(last)
    known = model["vocab"]
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in known]
    model["ignore_merges"] = ignores_merges
    (published / "tokenizer.json").write_text(json.dumps(described))
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    export_model(tmp_path / "checkpoint", out, name="x", lineage=[], dtype=None, with_gguf=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for text in (WHOLE, TEXT + "12345 \u00e9\r\n\n\n  'LL"):
        ids, _ = read_with_llama_cpp(out / GGUF_FILE, text)
        assert ids == tokenizer(text)["input_ids"], text
    assert (len(tokenizer(WHOLE)["input_ids"]) == 1) == ignores_merges


SPLIT_APART = "12345 a12 \r\n\n  x's'LL \n\n 99 ..\n"


def train_unsplit(directory: Path) -> None:
    """A tokenizer of the same size whose merges reach over every place where some splitting cuts."""
    tokenizer = small_tokenizer()
    size = tokenizer.get_vocab_size()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [SPLIT_APART, "12345", "a12", "\r\n\n", "..\n", "x's"] * 9, trainer
    )
    assert tokenizer.get_vocab_size() == size
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("pattern", [None, QWEN_SPLIT, THREE_DIGITS])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.sampled(3)  # each pattern
def test_an_imported_file_splits_texts_as_the_directory_beside_it(
    model_type: str, pattern: str | None, tmp_path: Path
) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    write_published_model(published, model_type=model_type)
    train_unsplit(published)
    if pattern is not None:
        split_as_qwen(published, pattern)
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    export_model(tmp_path / "checkpoint", out, name="x", lineage=[], dtype=None, with_gguf=True)
    import_model(str(out / GGUF_FILE), tmp_path / "again", tmp_path / "cache")
    first, again = (
        Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (out, tmp_path / "again")
    )
    assert again.encode(SPLIT_APART).ids == first.encode(SPLIT_APART).ids
    assert read_with_llama_cpp(out / GGUF_FILE, SPLIT_APART)[0] == first.encode(SPLIT_APART).ids


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (
            Keys.Tokenizer.PRE,
            "deepseek-coder",
            r"tokenizer\.ggml\.pre = 'deepseek-coder', wanted one of",
        ),
        (
            Keys.General.ARCHITECTURE,
            "mamba",
            r"general\.architecture = 'mamba', wanted one of llama",
        ),
    ],
)
def test_a_file_of_what_nobody_knows_is_refused_by_field(
    field: str, value: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    write_published_model(published)
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    add = GGUFWriter.add_string
    monkeypatch.setattr(
        GGUFWriter,
        "add_string",
        lambda self, key, text: add(self, key, value if key == field else text),
    )
    export_model(tmp_path / "checkpoint", out, name="x", lineage=[], dtype=None, with_gguf=True)
    with pytest.raises(ConfigError, match=says):
        import_model(str(out / GGUF_FILE), tmp_path / "work" / "again", tmp_path / "cache")
    assert not list(tmp_path.glob("work/*"))


@pytest.mark.parametrize("share", [0.0005, 0.05, 0.5, 0.9999])
@pytest.mark.sampled(2)
def test_a_file_that_was_cut_names_the_tensor(share: float, tmp_path: Path) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    write_published_model(published)
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    export_model(tmp_path / "checkpoint", out, name="x", lineage=[], dtype=None, with_gguf=True)
    whole = (out / GGUF_FILE).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    is_header = share < 0.01
    says = (
        "wanted a whole file" if is_header else rf"{cut.name} .* wanted \d+ for the end of tensor"
    )
    with pytest.raises(ConfigError, match=says):
        import_model(str(cut), tmp_path / "work" / "again", tmp_path / "cache")
    assert not list(tmp_path.glob("work/*"))


def test_model_without_a_gguf_form_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(
        ConfigError, match="a deepseek_v3 has no GGUF form here, wanted one of llama"
    ):
        write_gguf(tmp_path)
    assert not (tmp_path / GGUF_FILE).exists()


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
TWO_KINDS = {"norm_topk_prob": True, "mlp_only_layers": [0]}
GROUPED = {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "tie_word_embeddings": False,
}
ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("fields", "is_split_by_words", "says"),
    [
        (EXPERTS, False, "norm_topk_prob is False, wanted True for GGUF"),
        (EXPERTS | TWO_KINDS, False, r"mlp_only_layers is \[0\], wanted \[\] for GGUF"),
        (GROUPED, False, "n_group is 2, wanted 1 for GGUF"),
        (
            {"model_type": "qwen3", "rope_parameters": ROTATION, "tie_word_embeddings": False},
            False,
            "rope_type 'llama3' of a qwen3 is not written as GGUF, wanted default or linear; without",
        ),
        ({}, True, "the tokenizer splits texts by Whitespace .* in a way"),
    ],
)
def test_model_without_a_gguf_form_is_refused_before_anything_is_written(
    fields: dict, is_split_by_words: bool, says: str, tmp_path: Path
) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    write_published_model(published, **fields)
    if is_split_by_words:
        file = published / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        file.write_text(json.dumps(tokenizer | {"pre_tokenizer": {"type": "Whitespace"}}))
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    wanted = {"name": "x", "lineage": [], "dtype": None}
    with pytest.raises(ConfigError, match=says):
        export_model(tmp_path / "checkpoint", out, **wanted, with_gguf=True)
    assert not out.exists()
    export_model(tmp_path / "checkpoint", out, **wanted)
    assert (out / "config.json").is_file()
