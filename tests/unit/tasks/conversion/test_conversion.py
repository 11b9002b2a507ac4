"""Published models in and out: what goes in comes out, and what is wrong is refused in one message."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.published_model import write_published_model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_published_model(directory)
    return directory


def test_imported_and_exported_directory_answers_as_before(published: Path, tmp_path: Path) -> None:
    facts = import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    assert facts["family"] == "llama"
    export_model(tmp_path / "checkpoint", tmp_path / "out", name="x", lineage=["a@1"], dtype=None)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == (
        load_file(published / "model.safetensors").keys()
    )
    messages = [{"role": "user", "content": "add 12 and 3"}]
    answers = []
    for directory in (published, tmp_path / "out"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answers.append(model.generate(**tokens, max_new_tokens=8, do_sample=False).tolist())
    assert answers[0] == answers[1]
    assert "a@1" in (tmp_path / "out" / "README.md").read_text()


def test_export_names_no_code_that_is_not_in_it(tmp_path: Path) -> None:
    sizes = {
        "head_dim": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 9,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }
    published = tmp_path / "published"
    write_published_model(published, model_type="deepseek_v3", **sizes)
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((published / name).read_text())
        fields["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
        (published / name).write_text(json.dumps(fields))
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    out = tmp_path / "out"
    export_model(tmp_path / "checkpoint", out, name="x", lineage=[], dtype=None)
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((out / name).read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == "<|im_end|>"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([tokenizer("def add(a, b):")["input_ids"]])
    expected = transformers.DeepseekV3ForCausalLM.from_pretrained(published)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("model_type", ["mistral", "phi3"])
def test_export_of_another_family_has_fields_of_that_family_alone(
    model_type: str, tmp_path: Path
) -> None:
    fields = {"sliding_window": 48, "tie_word_embeddings": False, "pad_token_id": 0}
    write_published_model(tmp_path / "in", model_type=model_type, **fields)
    facts = import_model(str(tmp_path / "in"), tmp_path / "first", tmp_path / "cache")
    assert facts["family"] == model_type
    assert "at most 48 tokens, its sliding window, of " in str(facts["note"])
    export_model(tmp_path / "first", tmp_path / "out", name="x", lineage=[], dtype=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 48
    assert not config.keys() & {"sliding_window", "resid_pdrop", "embd_pdrop"}
    again = import_model(str(tmp_path / "out"), tmp_path / "second", tmp_path / "cache")
    assert again["family"] == "llama"
    first, second = (load_checkpoint(tmp_path / name) for name in ("first", "second"))
    assert first.spec == second.spec
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_archive_is_imported_like_its_directory(published: Path, tmp_path: Path) -> None:
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        for path in published.iterdir():
            opened.write(path, f"some/folder/{path.name}")
    for name, place in (("one", published), ("two", archive)):
        import_model(str(place), tmp_path / name, tmp_path / "cache")
    assert load_checkpoint(tmp_path / "one").weights.keys()
    for name, tensor in load_checkpoint(tmp_path / "one").weights.items():
        assert torch.equal(tensor, load_checkpoint(tmp_path / "two").weights[name])


def test_template_travels_with_checkpoints_of_later_stages(published: Path, tmp_path: Path) -> None:
    import_model(str(published), tmp_path / "base", tmp_path / "cache")
    base = load_checkpoint(tmp_path / "base")
    save_checkpoint(tmp_path / "next", base.spec, base.weights, tokenizer_path=base.tokenizer_path)
    export_model(tmp_path / "next", tmp_path / "out", name="x", lineage=[], dtype="bfloat16")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.chat_template == (
        transformers.AutoTokenizer.from_pretrained(published).chat_template
    )
    assert exported.eos_token == "<|im_end|>"


WRONG_FIELDS: dict[str, dict[str, object]] = {
    "unknown family": {"model_type": "mamba"},
    "unknown field": {"attention_sinks": 4},
    "impossible shape": {"num_key_value_heads": 4},
    "quantized": {"quantization_config": {"bits": 4}},
    "no heads": {"num_attention_heads": 0},
    "width as text": {"hidden_size": "wide"},
    "scaling without a factor": {"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None},
    "scaling as text": {"rope_scaling": "linear"},
    "half a rotation": {"partial_rotary_factor": 0.5},
    "another order of rotation": {"rope_interleaved": True},
    "fewer layers than weights": {"num_hidden_layers": 2},
}
BROKEN_FILES = {
    "broken tokenizer settings": ("tokenizer_config.json", b'{"bos_token": '),
    "list of tokenizer settings": ("tokenizer_config.json", b"[1]"),
    "template of other bytes": ("chat_template.jinja", b"\xff\xfe"),
    "index without a map": ("model.safetensors.index.json", b'{"metadata": {}}'),
    "index that leaves": ("model.safetensors.index.json", b'{"weight_map": {"a": "../a"}}'),
}


def damage_weights(directory: Path, how: str) -> None:
    """Makes a mistake in the tensors, or none of that name."""
    weights, norm = directory / "model.safetensors", "model.norm.weight"
    tensors = load_file(weights)
    if how == "half a file":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "wrong shape":
        save_file(tensors | {norm: torch.ones(7)}, weights)
    elif how == "missing tensor":
        save_file({name: tensor for name, tensor in tensors.items() if name != norm}, weights)
    elif how == "unknown tensor":
        save_file(tensors | {"model.extra.weight": torch.ones(2)}, weights)
    elif how == "unknown dtype":
        save_file(tensors | {norm: tensors[norm].to(torch.float64)}, weights)
    elif how == "a tensor in two files":
        weights.rename(directory / "one.safetensors")
        save_file({norm: tensors[norm] + 1}, directory / "two.safetensors")
    elif how in ("nan", "inf"):
        save_file(
            tensors | {norm: tensors[norm].index_fill(0, torch.tensor([3]), float(how))}, weights
        )
    elif how == "an output matrix of another shape":
        save_file(tensors | {"lm_head.weight": torch.ones(3, 144)}, weights)


def damage(directory: Path, how: str) -> None:
    """Makes one of the mistakes that people's directories have."""
    damage_weights(directory, how)
    config = directory / "config.json"
    settings = json.loads(config.read_text())
    if how == "missing shard":
        shards = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(shards))
    elif how in WRONG_FIELDS:
        config.write_text(json.dumps(settings | WRONG_FIELDS[how]))
    elif how in BROKEN_FILES:
        name, content = BROKEN_FILES[how]
        (directory / name).write_bytes(content)
    elif how == "no tokenizer":
        (directory / "tokenizer.json").unlink()
    elif how == "tokenizer with a hole":
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["a"] = 9999
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif how == "broken template":
        (directory / "chat_template.jinja").write_text("{% for message in %}")
    elif how == "half a GGUF file":
        shutil.rmtree(directory)
        directory.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x07" * 90)
    elif how == "no GGUF file":
        shutil.rmtree(directory)
        directory.write_bytes(b"<html>not found</html>")


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("missing shard", r"lacks model-00001-of-00002\.safetensors"),
        ("half a file", r"model\.safetensors cannot be read .* wanted a whole safetensors file"),
        ("wrong shape", r"model\.norm\.weight has shape \(7,\), wanted \(144,\)"),
        ("missing tensor", r"has no tensor model\.norm\.weight, wanted one of shape \(144,\)"),
        ("unknown tensor", r"tensor model\.extra\.weight \(2,\) is not part of a llama"),
        ("nan", r"model\.norm\.weight holds 1 values that are NaN or infinite, wanted none"),
        ("inf", r"model\.norm\.weight holds 1 values that are NaN or infinite, wanted none"),
        ("unknown dtype", r"model\.norm\.weight has dtype F64, wanted one of F32, BF16, F16"),
        ("unknown family", r"model family is 'mamba', wanted one of llama"),
        ("unknown field", r"attention_sinks = 4"),
        ("impossible shape", r"num_query_groups=4 must divide num_attention_heads=9"),
        ("quantized", r"quantization_config\.quant_method = None, wanted 'fp8'"),
        ("no heads", r"num_attention_heads = 0, wanted a positive whole number"),
        ("width as text", r"hidden_size = 'wide', wanted a positive whole number"),
        ("scaling without a factor", r"rope_scaling .*has no 'factor', wanted a number"),
        ("scaling as text", r"rope_scaling = 'linear', wanted an object"),
        ("half a rotation", r"partial_rotary_factor = 0\.5, only 1.* is supported"),
        ("another order of rotation", r"rope_interleaved = True, only False"),
        ("fewer layers than weights", r"model\.layers\.2\..* is not part of a llama"),
        ("broken tokenizer settings", r"tokenizer_config\.json is not JSON"),
        ("list of tokenizer settings", r"tokenizer_config\.json holds a list, wanted an object"),
        ("template of other bytes", r"chat_template\.jinja is not UTF-8"),
        ("index without a map", r"index\.json: weight_map = None, wanted file names by tensor"),
        ("index that leaves", r"index\.json names '\.\./a', wanted a file beside it"),
        (
            "a tensor in two files",
            r"two\.safetensors: tensor model\.norm\.weight .*one\.safetensors",
        ),
        ("an output matrix of another shape", r"lm_head\.weight \(3, 144\) is not part of a llama"),
        ("no tokenizer", r"holds no tokenizer\.json"),
        ("tokenizer with a hole", r"tokenizer\.json has no token of id \d+"),
        ("broken template", r"chat template does not parse, line 1"),
        ("half a GGUF file", r"model\.gguf cannot be read; wanted a whole file"),
        ("no GGUF file", r"begins with b'<htm', wanted b'GGUF'"),
    ],
)
@pytest.mark.sampled(10)
def test_bad_input_is_refused_and_leaves_nothing(
    how: str, wanted: str, published: Path, tmp_path: Path
) -> None:
    directory = tmp_path / ("model.gguf" if "GGUF" in how else "model")
    shutil.copytree(published, directory)
    damage(directory, how)
    with pytest.raises(ConfigError, match=wanted):
        import_model(str(directory), tmp_path / "work" / "checkpoint", tmp_path / "cache")
    assert not list(tmp_path.glob("work/*"))


def test_every_tensor_keeps_its_own_dtype(published: Path, tmp_path: Path) -> None:
    shutil.copytree(published, tmp_path / "in")
    tensors = load_file(published / "model.safetensors")
    mixed = {
        name: tensor if "norm" in name or "up_proj" in name else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
    save_file(mixed, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    import_model(str(tmp_path / "in"), tmp_path / "checkpoint", tmp_path / "cache")
    export_model(tmp_path / "checkpoint", tmp_path / "out", name="x", lineage=[], dtype=None)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == mixed.keys()
    for (
        name,
        tensor,
    ) in mixed.items():  # gate and up are one matrix here: the wider dtype holds both
        assert torch.equal(exported[name].float(), tensor.float()), name
        assert exported[name].dtype == tensor.dtype or "gate_proj" in name


def test_export_into_a_folder_in_use_is_refused(published: Path, tmp_path: Path) -> None:
    import_model(str(published), tmp_path / "checkpoint", tmp_path / "cache")
    with pytest.raises(ConfigError, match="not empty"):
        export_model(
            tmp_path / "checkpoint", tmp_path / "checkpoint", name="x", lineage=[], dtype=None
        )
