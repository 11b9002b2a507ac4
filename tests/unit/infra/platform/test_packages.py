"""Source archives of an index: the bytes are checked before anything reads them, and nothing of them is run."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.packages import (
    default_index,
    newest_version,
    pin,
    read_pip_settings,
)
from ostinato.infra.platform.source_archives import SourceArchive, fetch_archive, fetch_wheel
from tests.fakes.local_index import Answer, RecordingServer

NAME = "evil-pkg"
FILE = "evil_pkg-1.0.tar.gz"
JSON = "application/vnd.pypi.simple.v1+json"


def make_archive(marker: Path) -> bytes:
    """A source distribution whose build backend leaves a marker when anybody asks for its metadata."""
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n',
        "evil.py": f"open({str(marker)!r}, 'w').close()\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: evil-pkg\nVersion: 1.0\n",
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"evil_pkg-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


class Index(RecordingServer):
    """An index on this machine: what it answers by path, and the paths that were asked for."""

    def __init__(self, archive: bytes) -> None:
        self.archive = archive
        self.sha256 = hashlib.sha256(archive).hexdigest()
        self.answers: dict[str, list[tuple[int, str, bytes]]] = {}
        super().__init__()
        self.files = [self.file(FILE, self.sha256)]
        self.answers[f"/files/{FILE}"] = [(200, "application/gzip", archive)]

    def answer(self, path: str) -> Answer:
        answers = self.answers.get(path, [(404, "text/plain", b"")])
        code, kind, body = answers.pop(0) if len(answers) > 1 else answers[0]
        return code, {"Content-Type": kind}, body

    def file(self, name: str, sha256: str, url: str = "") -> dict[str, object]:
        hashes = {"sha256": sha256} if sha256 else {}
        return {"filename": name, "url": url or f"../../files/{name}", "hashes": hashes}

    def publish(self) -> None:
        page = {"meta": {"api-version": "1.0"}, "name": NAME, "files": self.files}
        self.answers[f"/simple/{NAME}/"] = [(200, JSON, json.dumps(page).encode())]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def index(marker: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    made = Index(make_archive(marker))
    made.publish()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{made.host}/simple")
    Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def fetch(tmp_path: Path, sha256: str = "") -> Path:
    return fetch_archive(SourceArchive(name=NAME, version="1.0", sha256=sha256), tmp_path / "cache")


def test_an_archive_comes_without_anything_of_it_being_run(
    index: Index, marker: Path, tmp_path: Path
) -> None:
    path = fetch(tmp_path, index.sha256)
    assert path == tmp_path / "cache" / f"{NAME}-1.0" / FILE
    assert path.read_bytes() == index.archive
    assert not marker.exists()


def test_an_archive_of_another_checksum_is_not_kept(
    index: Index, marker: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"has sha256 {index.sha256}, wanted 0000"):
        fetch(tmp_path, "0" * 64)
    assert not marker.exists()
    assert not (tmp_path / "cache").exists()


def test_an_archive_that_is_not_pinned_must_be_what_the_index_says(
    index: Index, marker: Path, tmp_path: Path
) -> None:
    index.files = [index.file(FILE, "1" * 64)]
    index.publish()
    with pytest.raises(ConfigError, match=rf"has sha256 {index.sha256}, wanted 1111"):
        fetch(tmp_path)
    assert not marker.exists()


def test_the_file_of_that_name_and_version_is_taken(index: Index, tmp_path: Path) -> None:
    others = ("evil_pkg-1.0-py3-none-any.whl", "evil_pkg-1.0.1.tar.gz", "evil_pkg_more-1.0.tar.gz")
    index.files = [index.file(name, "") for name in others] + index.files
    index.publish()
    assert fetch(tmp_path).name == FILE


def test_an_index_that_answers_in_html_is_read(index: Index, tmp_path: Path) -> None:
    link = f'<a href="/files/{FILE}#sha256={index.sha256}" data-yanked="">{FILE}</a>'
    index.answers[f"/simple/{NAME}/"] = [(200, "text/html; charset=utf-8", link.encode())]
    assert fetch(tmp_path).read_bytes() == index.archive


def test_a_file_that_the_index_names_and_lacks_is_no_empty_archive(
    index: Index, tmp_path: Path
) -> None:
    index.files = [index.file(FILE, "", url=f"/gone/{FILE}")]
    index.publish()
    with pytest.raises(ConfigError, match=r"404 Not Found.*/gone/"):
        fetch(tmp_path)


def test_an_index_that_cannot_be_read_is_passed_over_and_told_when_nothing_is_found(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"http://{index.host}/odd http://{index.host}/shut")
    index.answers[f"/odd/{NAME}/"] = [(200, JSON, b"[]")]
    index.answers[f"/shut/{NAME}/"] = [(403, "text/plain", b"")]
    assert fetch(tmp_path).read_bytes() == index.archive
    index.answers.pop(f"/simple/{NAME}/")
    with pytest.raises(ConfigError, match=r"(?s)odd is no index.*shut/evil-pkg/ answered 403"):
        fetch_archive(SourceArchive(name=NAME, version="1.0"), tmp_path / "other")


@pytest.mark.parametrize(("name", "value"), [("CERT", "/nowhere"), ("PROXY", "me:hunter2@x")])
def test_settings_of_pip_that_cannot_be_used_are_named(
    name: str, value: str, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ConfigError, match="pip's settings are cert=") as told:
        fetch(tmp_path)
    assert "hunter2" not in str(told.value)
    assert index.asked == []


def test_an_index_that_stumbles_is_asked_again(index: Index, tmp_path: Path) -> None:
    index.answers[f"/files/{FILE}"].insert(0, (503, "text/plain", b"busy"))
    assert fetch(tmp_path).read_bytes() == index.archive


def test_files_beside_an_index_are_found_as_pip_finds_them(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / FILE).write_bytes(index.archive)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch(tmp_path, index.sha256).read_bytes() == index.archive
    assert index.asked == []


def test_an_index_in_a_folder_is_read(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mirror" / NAME
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(index.archive)
    (folder / "index.html").write_text(f'<a href="{FILE}#sha256={index.sha256}">{FILE}</a>')
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "mirror").as_uri())
    index.answers.clear()
    assert fetch(tmp_path).read_bytes() == index.archive


def test_a_password_of_an_index_is_used_and_never_shown(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://reader:hunter2@{index.host}/simple")
    index.files = [index.file(FILE, "2" * 64, url=f"http://{index.host}/files/{FILE}")]
    index.publish()
    with pytest.raises(ConfigError, match="wanted 2222") as wrong:
        fetch(tmp_path)
    assert [sent for _, sent in index.asked] == ["Basic cmVhZGVyOmh1bnRlcjI="] * 2
    index.answers.clear()
    with pytest.raises(ConfigError, match="no source archive") as missing:
        fetch(tmp_path)
    assert "hunter2" not in f"{wrong.value} {missing.value}"


def test_a_page_of_the_network_names_no_file_of_this_machine(index: Index, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(index.archive)
    index.files = [index.file(FILE, "", url=(tmp_path / FILE).as_uri())]
    index.publish()
    with pytest.raises(ConfigError, match="no source archive"):
        fetch(tmp_path)


def test_of_wheels_the_one_that_fits_this_interpreter_is_taken(
    index: Index, tmp_path: Path
) -> None:
    names = ("evil_pkg-1.0-cp27-cp27m-win32.whl", "evil_pkg-1.0-py3-none-any.whl")
    index.files = [*index.files, *(index.file(name, "") for name in names)]
    index.publish()
    index.answers[f"/files/{names[1]}"] = [(200, "application/zip", b"wheel")]
    wheel = fetch_wheel(f"{NAME}==1.0", tmp_path / "cache")
    assert (wheel.name, wheel.read_bytes()) == (names[1], b"wheel")
    assert fetch_wheel(f"{NAME}==1.0", tmp_path / "cache") == wheel


def test_a_wheel_is_judged_by_the_whole_version_of_this_python(
    index: Index, tmp_path: Path
) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    name = "evil_pkg-1.0-py3-none-any.whl"
    told = {"requires-python": f">={version},!={version[: version.rindex('.')]}"}
    index.files = [{**index.file(name, ""), **told}]
    index.publish()
    index.answers[f"/files/{name}"] = [(200, "application/zip", b"wheel")]
    assert fetch_wheel(f"{NAME}==1.0", tmp_path / "cache").name == name


def test_the_default_index_is_the_one_that_this_pip_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"(default {default_index()})" in " ".join(said.stdout.split())


def test_a_wheel_of_another_checksum_is_not_kept_and_one_that_changed_is_refused(
    index: Index, tmp_path: Path
) -> None:
    name = f"{NAME.replace('-', '_')}-1.0-py3-none-any.whl"
    index.files = [index.file(name, index.sha256)]
    index.answers[f"/files/{name}"] = [(200, "application/zip", index.archive)]
    index.publish()
    requirement, cache = f"{NAME}==1.0", tmp_path / "cache"
    with pytest.raises(ConfigError, match=rf"has sha256 {index.sha256}, wanted 0000"):
        fetch_wheel(requirement, cache, "0" * 64)
    assert not cache.exists()
    wheel = fetch_wheel(requirement, cache)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ConfigError, match=rf"wanted {index.sha256}; delete it"):
        fetch_wheel(requirement, cache)


@pytest.mark.parametrize("setting", ["QUIET=1", "QUIET=3", "VERBOSE=1", "VERBOSE=3", "USER=1"])
def test_how_much_pip_says_and_where_it_installs_changes_no_answer(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quiet pip lists no settings: another index than the user's would be asked."""
    with zipfile.ZipFile(tmp_path / "kit-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kit-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: kit\nVersion: 1\n")
        wheel.writestr("kit-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("kit-1.dist-info/RECORD", "")
    name, _, value = setting.partition("=")
    monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    assert read_pip_settings()["find-links"] == str(tmp_path)
    assert newest_version("kit") == "1"
    assert pin(["kit"]) == ("kit==1",)
