"""Files of strangers that lie about their sizes or are nested without end: one sentence, at once."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.rendering import load_renderer
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.conversion.sources import open_source
from tests.fakes.published_model import write_published_model

HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"a"
ODD_GGUF = {
    "array": HEAD + KEY + struct.pack("<IIQ", 9, 0, 2**60),
    "array of arrays": HEAD + KEY + struct.pack("<IIQ", 9, 9, 2**60),
    "array of strings": HEAD + KEY + struct.pack("<IIQ", 9, 8, 2**60),
    "string": HEAD + KEY + struct.pack("<IQ", 8, 2**60),
    "key": HEAD + struct.pack("<Q", 2**60),
    "fields": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "dimensions": b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY + struct.pack("<I", 2**31),
    "deep": HEAD + KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
}


@pytest.mark.parametrize("kind", ODD_GGUF)
def test_a_gguf_that_says_more_than_it_holds_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(ODD_GGUF[kind] + b"\0" * 64)
    with (
        pytest.raises(ConfigError, match=r"a\.gguf cannot be read"),
        open_source(str(file), tmp_path, tmp_path),
    ):
        pass


def test_a_gguf_of_more_layers_than_tensors_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(2**31)
    writer.add_embedding_length(64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.0, 0.0])
    writer.add_tensor("token_embd.weight", np.zeros((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with (
        pytest.raises(ConfigError, match=r"llama\.block_count = 2147483648, wanted at most 1"),
        open_source(str(file), tmp_path, tmp_path),
    ):
        pass


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"rope_theta": NaN}'])
def test_json_that_is_too_deep_or_has_no_number_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with (
        pytest.raises(ConfigError, match=r"config\.json is (nested 100000 levels deep|not JSON)"),
        open_source(str(tmp_path), tmp_path, tmp_path),
    ):
        pass


BANDS = {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1, "high_freq_factor": 4}
ODD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2**60}, r"config\.json has 1152921504606846976 layers"),
    ({"vocab_size": 2**62}, r"tensor model\.embed_tokens\.weight has shape"),
    ({"head_dim": 2**62}, r"tensor model\.layers\.0\.self_attn\.q_proj\.weight has shape"),
    ({"hidden_size": 10**300}, "has shape"),
    ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta = 1000"),
    ({"rope_parameters": {**BANDS, "factor": 10**400}}, "factor = 1000"),
    (
        {"rope_parameters": {**BANDS, "factor": 8, "original_max_position_embeddings": 10**400}},
        "original_max_position_embeddings = 1000",
    ),
    ({"layer_types": 5, "model_type": "qwen2"}, "layer_types = 5, wanted only full_attention"),
]
ODD_TEMPLATES: list[tuple[Any, str]] = [
    (5, "has chat_template = 5, wanted a text"),
    ({"default": "x"}, 'has chat_template = {"default": "x"}, wanted a text'),
    ([5], r"has chat_template = \[5\], wanted a text"),
    ([{"name": "default", "template": 5}], "wanted a text, or a list of names and templates"),
    ("{{ " + "1" * 5000 + " }}", "the chat template does not parse: .*5000 digits"),
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_published_model(directory)
    return directory


def refuse_changed(published: Path, folder: Path, file: str, fields: dict[str, Any]) -> str:
    """The message with which a model with changed fields in one of its files is refused."""
    shutil.copytree(published, folder / "odd")
    changed = json.loads((published / file).read_text()) | fields
    (folder / "odd" / file).write_text(json.dumps(changed))
    with pytest.raises(ConfigError) as caught:
        import_model(str(folder / "odd"), folder / "checkpoint", folder / "cache")
    assert not (folder / "checkpoint").exists()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize(("fields", "message"), ODD_CONFIGS)
def test_a_config_of_impossible_sizes_is_refused_at_once(
    fields: dict[str, Any], message: str, published: Path, tmp_path: Path
) -> None:
    refused = refuse_changed(published, tmp_path, "config.json", fields)
    assert re.search(message, refused)


@pytest.mark.parametrize(("template", "message"), ODD_TEMPLATES)
def test_a_template_that_is_no_text_is_refused_and_not_replaced(
    template: Any, message: str, published: Path, tmp_path: Path
) -> None:
    fields = {"chat_template": template}
    refused = refuse_changed(published, tmp_path, "tokenizer_config.json", fields)
    assert re.search(message, refused)


@pytest.mark.parametrize("stride", [0, 9])  # 9: the library panics when it encodes a text
def test_limits_of_a_tokenizer_do_not_cut_prompts(
    stride: int, published: Path, tmp_path: Path
) -> None:
    shutil.copytree(published, tmp_path / "odd")
    described = json.loads((published / "tokenizer.json").read_text())
    limits = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": stride}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    changed = described | {"truncation": limits, "padding": padding}
    (tmp_path / "odd" / "tokenizer.json").write_text(json.dumps(changed))
    wanted = import_model(str(published), tmp_path / "plain", tmp_path / "cache")
    facts = import_model(str(tmp_path / "odd"), tmp_path / "checkpoint", tmp_path / "cache")
    assert facts["chat_template"] == wanted["chat_template"]
    plain, odd = (load_renderer(tmp_path / name) for name in ("plain", "checkpoint"))
    assert odd.start("word " * 100) == plain.start("word " * 100)
    written = json.loads((tmp_path / "checkpoint" / "tokenizer.json").read_text())
    assert written["truncation"] is written["padding"] is None
