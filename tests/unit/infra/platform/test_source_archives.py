"""Source archives: what is cached is used as it was pinned, and nothing unsafe gets in."""

import io
import tarfile
import zipfile

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.source_archives import (
    SourceArchive,
    fetch_archive,
    read_archive,
    read_wheel,
)
from tests.fakes.repositories import WORDKIT, open_repository, write_archive


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
    with pytest.raises(ConfigError, match=r"wordkit==1\.0 is missing[\s\S]*fix: .*wordkit-1\.0"):
        fetch_archive(WORDKIT, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_changed_archive_is_refused(tmp_path):
    archive = write_archive(WORDKIT, tmp_path)
    fetch_archive(WORDKIT, tmp_path)
    archive.write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(ConfigError, match=r"has sha256 .* wanted"):
        fetch_archive(WORDKIT, tmp_path)


@pytest.mark.parametrize("name", ["kit/../../escape.py", "/etc/escape.py"])
def test_archive_that_leaves_its_folder_is_refused(tmp_path, name):
    write_tar(tmp_path / "bad.tar.gz", {name: b"x"})
    with pytest.raises(ConfigError, match=r"below its top folder"):
        read_archive(tmp_path / "bad.tar.gz")


def test_torn_archive_is_a_clear_error(tmp_path):
    (tmp_path / "torn.tar.gz").write_bytes(write_archive(WORDKIT, tmp_path).read_bytes()[:200])
    with pytest.raises(ConfigError, match="delete it"):
        read_archive(tmp_path / "torn.tar.gz")


def test_pinned_archive_that_differs_is_refused(tmp_path):
    write_archive(WORDKIT, tmp_path)
    pinned = SourceArchive(name=WORDKIT.name, version=WORDKIT.version, sha256="0" * 64)
    with pytest.raises(ConfigError, match=r"wordkit==1\.0 has sha256 .* wanted 0000"):
        fetch_archive(pinned, tmp_path)


def test_a_folder_of_an_archive_is_read_alone(tmp_path):
    write_tar(
        tmp_path / "kit.tar.gz",
        {"kit-1/src/kit/a.py": b"a", "kit-1/src/kitten/b.py": b"b", "kit-1/setup.py": b"s"},
    )
    assert read_archive(tmp_path / "kit.tar.gz", below="src/kit") == {"a.py": b"a"}


@pytest.mark.parametrize("path", ["../escape.py", "/etc/escape.py", "kit/../../escape.py"])
def test_wheel_that_leaves_its_folder_is_refused(tmp_path, path):
    with zipfile.ZipFile(tmp_path / "kit-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(path, "x")
    with pytest.raises(ConfigError, match=r"escape\.py', wanted paths below its top folder"):
        read_wheel(tmp_path / "kit-1-py3-none-any.whl", is_whole=True)


def test_library_folders_of_a_wheel_move_up_as_at_an_installation(tmp_path):
    with zipfile.ZipFile(tmp_path / "kit-1-py3-none-any.whl", "w") as wheel:
        for path in ("kit/a.py", "kit-1.data/purelib/kit/b.py", "kit-1.data/scripts/run.py"):
            wheel.writestr(path, "x")
    assert set(read_wheel(tmp_path / "kit-1-py3-none-any.whl")) == {"kit/a.py", "kit/b.py"}
