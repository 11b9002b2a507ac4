"""Chat templates of imported models: given to those that came without, kept, exported, and used by others."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.rendering import load_renderer
from ostinato.models.rendering.chat_template import TemplateRenderer
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.conversion.templates import choose_template
from tests.fakes.published_model import TEMPLATE, small_tokenizer, write_published_model
from tests.fakes.thinking_template import THINKING_TEMPLATE, thinking_tokenizer

REWRITING = TEMPLATE.replace("messages %}", "messages[-2:] %}")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}


def plain_tokenizer() -> Tokenizer:
    """As Llama 3's base: a beginning that the tokenizer adds, an end, no token of a chat."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=276,
        special_tokens=["<|begin|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def add(a, b):\n    return a + b\n"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


def base_model(directory: Path, tokenizer: Tokenizer | None = None, **settings: object) -> Path:
    """A model without a chat template. Its bos and eos tokens stand in config.json alone."""
    fields = {} if tokenizer is None else {"bos_token_id": 0, "eos_token_id": 1}
    write_published_model(directory, **fields)
    (tokenizer or small_tokenizer()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def take_in(published: Path, directory: Path, template: str | None = None) -> tuple[Path, str]:
    facts = import_model(str(published), directory / "base", directory / "cache", template)
    return directory / "base", str(facts["chat_template"])


@pytest.mark.parametrize(
    ("name", "tokenizer", "ends"),
    [("chatml", None, "<|im_end|>"), ("plain", plain_tokenizer(), "<|end_of_text|>")],
)
def test_a_base_model_is_given_a_template_that_travels_with_it(
    name: str, tokenizer: Tokenizer | None, ends: str, tmp_path: Path
) -> None:
    base, told = take_in(base_model(tmp_path / "in", tokenizer), tmp_path)
    assert told == f"{name}, the model came without one"
    ours = load_renderer(base)
    assert isinstance(ours, TemplateRenderer)
    assert ours.is_chosen
    assert ours.states_tools
    assert ours.decode([ours.end_id]) == ends
    answer = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    tokens = [
        *ours.start("add 12", "Be short.", TOOLS),
        *ours.encode_answer(answer),
        *ours.append_results(["15", "ok"], note="hurry"),
    ]
    export_model(base, tmp_path / "out", name="x", lineage=[], dtype=None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "add 12"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "15"},
        {"role": "tool", "content": "ok"},
        {"role": "user", "content": "hurry"},
    ]
    wanted = theirs.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=True
    )
    assert tokens == wanted["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert ours.end_id in np.atleast_1d(model.generation_config.eos_token_id)


def test_a_template_of_ones_own_takes_the_place_of_the_models(tmp_path: Path) -> None:
    write_published_model(tmp_path / "in", REWRITING)
    _, told = take_in(tmp_path / "in", tmp_path / "refused")
    assert told.startswith("its own, which is refused: the chat template rewrites history")
    assert told.endswith("import it with --chat-template chatml, plain or a file")
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    base, told = take_in(tmp_path / "in", tmp_path / "taken", str(tmp_path / "mine.jinja"))
    assert told.endswith("mine.jinja, as asked for")
    assert load_renderer(base).append_user("a")
    export_model(base, tmp_path / "out", name="x", lineage=[], dtype=None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template == TEMPLATE


def test_a_template_that_thinks_is_taken_and_said(tmp_path: Path) -> None:
    write_published_model(tmp_path / "in", THINKING_TEMPLATE, vocab_size=320)
    thinking_tokenizer().save(str(tmp_path / "in" / "tokenizer.json"))
    base, told = take_in(tmp_path / "in", tmp_path)
    assert "removes <think> blocks from answers before the last question" in told
    assert load_renderer(base).append_results(["ok"])


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "'mine.jinja' is no file, wanted one or chatml or plain"),
        (b"{% for %}", "does not parse, line 1"),
        (b"\xff\xfe", "is not UTF-8"),
        (REWRITING.encode(), "rewrites history"),
        (TEMPLATE.replace("<|im_end|>", "").encode(), "ends an answer with"),
    ],
)
def test_a_template_that_holds_no_conversation_is_refused(
    content: bytes | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_published_model(tmp_path / "in")
    if content is not None:
        Path("mine.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match=wanted):
        take_in(tmp_path / "in", tmp_path, "mine.jinja")
    assert not (tmp_path / "base").exists()


def test_chatml_is_refused_where_its_tokens_are_none(tmp_path: Path) -> None:
    published = base_model(tmp_path / "in", plain_tokenizer())
    with pytest.raises(ConfigError, match=r"chatml: .* ends an answer with '<\|im_end\|>"):
        take_in(published, tmp_path, "chatml")


def test_a_model_without_an_end_is_told_what_it_lacks(tmp_path: Path) -> None:
    published = base_model(tmp_path / "in", plain_tokenizer())
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (published / "generation_config.json").unlink()
    base, told = take_in(published, tmp_path)
    assert told.startswith("none, and no eos_token")
    with pytest.raises(ValueError, match="import the model again with --chat-template"):
        load_renderer(base)
    with pytest.raises(ConfigError, match="plain ends answers with eos_token"):
        take_in(published, tmp_path / "again", "plain")


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [2, 0]}, {}, (0, 2)),
        ({"eos_token_id": 0}, {}, (0, 2)),
        (None, {"eos_token_id": [0, 2, 1]}, (0, 1, 2)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0, 2)),
        ({"eos_token_id": [0]}, {"eos_token_id": 1}, (0, 1, 2)),
        (None, {"eos_token_id": None}, (2,)),
    ],
)
@pytest.mark.sampled(3)
def test_answers_end_at_every_end_that_a_file_names_and_exports_name_all(
    generation: dict | None, config: dict, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    write_published_model(tmp_path / "in", TEMPLATE, **config)
    (tmp_path / "in/generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "in/generation_config.json").write_text(json.dumps(generation))
    base, _ = take_in(tmp_path / "in", tmp_path)
    assert load_renderer(base).stop_token_ids == wanted
    export_model(base, tmp_path / "out", name="x", lineage=[], dtype=None, with_gguf=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert set(np.atleast_1d(theirs.generation_config.eos_token_id)) == set(wanted)
    (file,) = (tmp_path / "out").glob("*.gguf")
    again = import_model(str(file), tmp_path / "again", tmp_path / "cache")
    assert again["vocabulary"]
    # of a GGUF, ends are also known by their texts
    assert set(load_renderer(tmp_path / "again").stop_token_ids) == {0, *wanted}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", [[2, 999999], -1, "2", [True], 2.5, [[2]]])
@pytest.mark.sampled(5)  # both files
def test_an_end_outside_of_the_vocabulary_is_refused(
    name: str, value: object, tmp_path: Path
) -> None:
    write_published_model(tmp_path / "in", TEMPLATE)
    file = tmp_path / "in" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": value}))
    with pytest.raises(ConfigError, match=rf"{name} has eos_token_id = .*wanted ids of 0 to "):
        take_in(tmp_path / "in", tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "name", ["bos_token", "eos_token", "pad_token", "chat_template", "bos_token_id"]
)
@pytest.mark.parametrize(
    "value", [5, ["x"], {"x": 1}, {"content": 5}, [{"name": "default"}], [[]], -1, 2**70]
)
def test_odd_values_in_small_files_are_said_or_refused_in_one_sentence(
    file: str, name: str, value: object
) -> None:
    files = {file: json.dumps({"eos_token": "<|im_end|>", name: value}).encode()}
    for config, wanted in (({}, None), ({"bos_token_id": -1}, "chatml"), ({name: value}, None)):
        try:
            _, said = choose_template(files, config, small_tokenizer(), wanted)
        except ConfigError as error:
            said = str(error)
        assert said
        assert "\n" not in said


@pytest.mark.parametrize("named", [{}, {"bos_token": None}, {"added_tokens_decoder": {}}])
def test_a_beginning_of_the_special_tokens_map_is_in_the_prompt_as_in_transformers(
    named: dict, tmp_path: Path
) -> None:
    write_published_model(tmp_path / "in", "{{ bos_token }}" + TEMPLATE)
    settings = tmp_path / "in/tokenizer_config.json"
    kept = json.loads(settings.read_text())
    del kept["bos_token"]
    settings.write_text(json.dumps(kept | named))
    (tmp_path / "in/special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|endoftext|>", "lstrip": False}})
    )
    base, _ = take_in(tmp_path / "in", tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    messages = [{"role": "user", "content": "add"}]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert load_renderer(base).start("add") == wanted["input_ids"]
