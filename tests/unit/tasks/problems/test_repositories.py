"""Archives and prepared repositories: nothing unsafe gets in, nothing that answers stays."""

import ast
import io
import tarfile

import pytest

from infra.errors import ProblemError
from infra.sandbox import PreparedRepository
from tasks.problems.archives import fetch_archive, read_archive
from tasks.problems.repositories import prepare_repository, strip_source
from tests.fakes.repositories import LEDGERKIT, WORDKIT, open_repository, write_archive


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_archive_round_trip(tmp_path):
    files = read_archive(write_archive(WORDKIT, tmp_path))
    assert files == dict(open_repository(WORDKIT).files.items())


def test_cached_archive_is_used_without_the_index(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    written = write_archive(WORDKIT, tmp_path)
    assert fetch_archive(WORDKIT, tmp_path) == written


def test_missing_package_names_version_and_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ProblemError, match=r"wordkit==1\.0 is missing[\s\S]*fix: .*wordkit-1\.0"):
        fetch_archive(WORDKIT, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_changed_archive_is_refused(tmp_path):
    archive = write_archive(WORDKIT, tmp_path)
    fetch_archive(WORDKIT, tmp_path)
    archive.write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(ProblemError, match=r"has sha256 .* wanted"):
        fetch_archive(WORDKIT, tmp_path)


@pytest.mark.parametrize("name", ["kit/../../escape.py", "/etc/escape.py"])
def test_archive_that_leaves_its_folder_is_refused(tmp_path, name):
    write_tar(tmp_path / "bad.tar.gz", {name: b"x"})
    with pytest.raises(ProblemError, match=r"below its top folder"):
        read_archive(tmp_path / "bad.tar.gz")


def test_torn_archive_is_a_clear_error(tmp_path):
    (tmp_path / "torn.tar.gz").write_bytes(write_archive(WORDKIT, tmp_path).read_bytes()[:200])
    with pytest.raises(ProblemError, match="delete it"):
        read_archive(tmp_path / "torn.tar.gz")


@pytest.mark.parametrize("source", [WORDKIT, LEDGERKIT])
def test_stripping_drops_text_and_keeps_code(source):
    repository = open_repository(source)
    for path, text in repository.files.items():
        if repository.is_editable(path):
            stripped = strip_source(text, path)
            assert strip_source(stripped, path) == stripped
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


def test_preparing_twice_gives_the_same_fingerprint(tmp_path):
    files = open_repository(WORDKIT).files
    first = prepare_repository(WORDKIT, files, tmp_path / "a", strip_text=True)
    second = prepare_repository(WORDKIT, files, tmp_path / "b", strip_text=True)
    unstripped = prepare_repository(WORDKIT, files, tmp_path / "c", strip_text=False)
    assert first.fingerprint == second.fingerprint != unstripped.fingerprint


def test_archive_without_the_wanted_path_is_refused(tmp_path):
    with pytest.raises(ProblemError, match=r"wordkit==1\.0: the archive holds nothing at wordkit"):
        prepare_repository(WORDKIT, {"README": b""}, tmp_path, strip_text=True)
