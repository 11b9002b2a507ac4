"""Prepared repositories: nothing that answers stays."""

import ast
import importlib.metadata

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import write_folder
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.repositories import (
    describe_installation,
    prepare_repository,
    strip_source,
)
from tests.fakes.repositories import LEDGERKIT, WORDKIT, open_repository


@pytest.mark.parametrize("source", [WORDKIT, LEDGERKIT])
def test_stripping_drops_text_and_keeps_code(source):
    repository = open_repository(source)
    for path, text in repository.files.items():
        if repository.is_editable(path):
            stripped = strip_source(text)
            assert strip_source(stripped) == stripped
            assert b'"""' not in stripped
            assert b"#" not in stripped
            names = [
                node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
            ]
            again = [
                node.name
                for node in ast.walk(ast.parse(stripped))
                if isinstance(node, ast.FunctionDef)
            ]
            assert again == names


def test_prepared_repository_holds_product_and_tests_only(tmp_path):
    files = dict(open_repository(WORDKIT).files)
    files |= {"docs/answers.md": b"gold", "wordkit/__pycache__/counting.cpython-311.pyc": b"x"}
    files |= {"setup.py": b"", "LICENSE": b"free", "wordkit.egg-info/SOURCES.txt": b""}
    made = prepare_repository(WORDKIT, files, tmp_path, strip_text=True)
    assert set(made.files) == set(open_repository(WORDKIT).files)
    assert made.files["tests/test_counting.py"] == files["tests/test_counting.py"]
    assert (tmp_path / "LICENSE").read_bytes() == b"free"
    assert PreparedRepository.load(tmp_path) == made


def test_mark_of_byte_order_goes_from_product_code_alone(tmp_path):
    files = dict(open_repository(WORDKIT).files)
    marked = {path: b"\xef\xbb\xbf" + text for path, text in files.items() if path.endswith(".py")}
    made = prepare_repository(WORDKIT, {**files, **marked}, tmp_path, strip_text=False)
    for path, text in marked.items():
        assert made.files[path] == (text if made.is_test(path) else files[path])


def test_preparing_twice_gives_the_same_fingerprint(tmp_path):
    files = open_repository(WORDKIT).files
    first = prepare_repository(WORDKIT, files, tmp_path / "a", strip_text=True)
    second = prepare_repository(WORDKIT, files, tmp_path / "b", strip_text=True)
    unstripped = prepare_repository(WORDKIT, files, tmp_path / "c", strip_text=False)
    assert first.fingerprint == second.fingerprint != unstripped.fingerprint


def test_archive_without_the_wanted_path_is_refused(tmp_path):
    with pytest.raises(ProblemError, match="wordkit: the source holds nothing at 'wordkit'"):
        prepare_repository(WORDKIT, {"README": b""}, tmp_path, strip_text=True)


@pytest.mark.parametrize("name", ["test_\udcff.py", "test_a\nb.py"])
def test_a_file_without_a_printable_name_is_left_out(tmp_path, name):
    files = {**open_repository(WORDKIT).files, f"tests/{name}": b""}
    made = prepare_repository(WORDKIT, files, tmp_path, strip_text=False)
    assert set(made.files) == set(open_repository(WORDKIT).files)


@pytest.mark.parametrize("path", ["../outside.py", "{}/outside.py", "a/../../outside.py"])
def test_no_file_is_written_outside_the_repository(tmp_path, path):
    """A wheel's entry, a setting of a build and a COPY instruction all name such paths."""
    files = open_repository(WORDKIT).files
    target = tmp_path / "a" / "b"
    odd = path.format(tmp_path)
    with pytest.raises(ProblemError, match=r"outside\.py.*wanted a path below"):
        prepare_repository(WORDKIT, files, target, strip_text=False, installed={odd: b""})
    assert not list(tmp_path.rglob("outside.py"))


@pytest.mark.parametrize("path", ["data/" + "n" * 300, "data/a\0b"], ids=["long", "zero"])
def test_a_name_that_no_file_can_have_is_a_clear_error(tmp_path, path):
    files = open_repository(WORDKIT).files
    with pytest.raises(ProblemError, match="cannot be written"):
        prepare_repository(WORDKIT, files, tmp_path, strip_text=False, installed={path: b""})


@pytest.mark.parametrize("name", ["word-kit", "Word.Kit", "word_kit", "../../word/kit"])
def test_a_project_finds_its_own_version(tmp_path, monkeypatch, name):
    """importlib.metadata ends the name of a folder at its first hyphen."""
    source = WORDKIT.model_copy(update={"name": name})
    write_folder(tmp_path, describe_installation(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = name.removeprefix("../../").replace("/", "-")
    assert importlib.metadata.version(wanted) == WORDKIT.version
