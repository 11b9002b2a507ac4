"""Every reader of files that strangers wrote: what is too large, too deep or no number ends in one sentence that names
the file, the value seen and the limit, and nothing of it is read first.
"""

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.infra.platform.bounded_files import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_ROW_BYTES,
    MAX_TOML_BYTES,
    parse_json,
    parse_toml,
    read_bounded,
)
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.row_files import read_rows
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.discovery.collection import read_rules
from ostinato.infra.sandbox.discovery.metadata import read_metadata
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.conversion.sources import SIDE_FILES, TOKENIZER
from ostinato.tasks.conversion.templates import MAX_TEMPLATE_BYTES
from ostinato.tasks.corpus.chat_rows import Call, read_conversations
from ostinato.tasks.corpus.config import CodeSource
from ostinato.tasks.corpus.source_code import sources
from ostinato.tasks.problems.certification.signing import read_signed
from ostinato.tasks.problems.given.harbor_reading import read_task
from ostinato.tasks.problems.given.swe_bench import Instance, read_instances
from tests.fakes.published_model import write_published_model

DEEP = 100_000
DEEP_JSON = b'{"a":' * DEEP
DEEP_TOML = b"a = " + b"[" * DEEP
Reader = Callable[[Path], object]


def imported(name: str) -> Reader:
    """Import of a sound model directory of which one file is given."""

    def read(path: Path) -> object:
        model = path.with_name("model")
        write_published_model(model)
        path.replace(model / name)
        return import_model(str(model), path.with_name("made"), path.with_name("cache"))

    return read


def corpus_rows(path: Path) -> object:
    source = CodeSource(name="rows", kind="jsonl", path=str(path.parent))
    settings = Settings(home=path.parent / "home")
    return list(sources.read_rows(source, sources.pin_rows(source, settings), settings))


def harbor(path: Path) -> object:
    (path.parent / "instruction.md").write_text("Mend it.")
    path.replace(path.parent / "task.toml")
    return read_task(path.parent)


JSON_FILES: dict[str, Reader] = {
    **{
        name: imported(name)
        for name in ("config.json", "model.safetensors.index.json", "tokenizer.json", *SIDE_FILES)
        if name.endswith(".json")
    },
    "rows.json": lambda path: list(read_rows(path, (".json",))),
    "rows.jsonl": lambda path: list(read_rows(path, (".jsonl",))),
    "conversations.jsonl": read_conversations,
    "instances.jsonl": read_instances,
    "corpus.jsonl": corpus_rows,
    "certificate.json": read_signed,
}
TOML_FILES: dict[str, Reader] = {
    "pyproject.toml": lambda path: read_metadata({path.name: path.read_bytes()}, "project"),
    "task.toml": harbor,
}
# that read one file of theirs, of a project or a model
MODULES = (
    "infra/platform/row_files.py",
    "tasks/conversion/sources.py",
    "tasks/corpus/chat_rows.py",
    "tasks/corpus/source_code/sources.py",
    "tasks/problems/certification/signing.py",
    "infra/sandbox/discovery/collection.py",
    "infra/sandbox/discovery/metadata.py",
    "tasks/problems/given/harbor_reading.py",
    "tasks/problems/given/swe_bench.py",
)


def refusal(reader: Reader, path: Path) -> str:
    """The sentence that a file is refused with."""
    with pytest.raises(OstinatoError) as refused:
        reader(path)
    said = str(refused.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_is_nested_without_end_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(DEEP_JSON + b"\n")
    said = refusal(JSON_FILES[name], path)
    assert f"nested {DEEP} levels deep, wanted at most {MAX_DEPTH}" in said or name == TOKENIZER
    assert name in said or name == TOKENIZER


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_file_that_is_too_large_is_refused_unread(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:  # it takes no place on the disk
        file.truncate((MAX_ROW_BYTES if name.endswith("jsonl") else 4 * MAX_FILE_BYTES) + 1)
    said = refusal(JSON_FILES[name], path)
    assert name in said
    assert "bytes" in said
    assert "wanted" in said


@pytest.mark.parametrize("name", TOML_FILES)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DEEP_TOML, f"nested {DEEP} levels deep, wanted at most {MAX_DEPTH}"),
        (b"a." * DEEP + b"a = 1", "a key of more than 100 parts"),
        (b"#" * (MAX_TOML_BYTES + 1), f"wanted at most {MAX_TOML_BYTES}"),
        (b"a = ", "is not TOML"),
        (b"\xff = 1", "is not TOML"),
    ],
    ids=["deep", "long key", "large", "cut", "no text"],
)
def test_toml_of_a_strangers_project_is_refused(
    name: str, text: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    said = refusal(TOML_FILES[name], path)
    assert name in said
    assert says in said or (name == "task.toml" and text == b"\xff = 1")


def test_a_template_that_is_too_large_is_refused_unparsed(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"a" * (MAX_TEMPLATE_BYTES + 1))
    assert f"wanted at most {MAX_TEMPLATE_BYTES}" in refusal(imported(path.name), path)


def test_settings_of_pytest_that_do_not_parse_are_those_of_no_file() -> None:
    assert read_rules({"pytest.toml": DEEP_TOML, "pyproject.toml": DEEP_TOML}) == read_rules({})


def test_json_within_a_field_is_bounded_too() -> None:
    with pytest.raises(ValueError, match="levels deep"):
        Call.model_validate({"function": {"name": "a", "arguments": DEEP_JSON.decode()}})
    row = dict.fromkeys(Instance.model_fields, "x") | {"FAIL_TO_PASS": DEEP_JSON.decode()}
    with pytest.raises(ValueError, match="levels deep"):
        Instance.model_validate({name.lower(): value for name, value in row.items()})


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps({"a": "[" * 1000 + '"' + "{" * 1000 + "\\"})
    assert parse_json("a", text) == json.loads(text)
    assert parse_toml("a", b"a = 1  # [[") == {"a": 1}


def test_a_device_without_a_size_is_not_read_to_its_end() -> None:
    with pytest.raises(
        OstinatoError, match="/dev/zero has 1001 bytes or more, wanted at most 1000"
    ):
        read_bounded(Path("/dev/zero"), 1_000)


@pytest.mark.parametrize("module", MODULES)
def test_readers_of_strangers_files_know_no_other_way(module: str) -> None:
    source = (Path(__file__).parents[2] / module).read_text()
    called = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    }
    assert not {"json.loads", "json.load", "tomllib.loads", "tomllib.load"} & called
    assert not [name for name in called if name.endswith((".read_bytes", ".read_text"))]
