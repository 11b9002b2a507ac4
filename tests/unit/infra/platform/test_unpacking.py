"""Bombs: small archives that unpack to much more than they may. Each ends in one error, early."""

import gzip
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard

from ostinato.infra.platform import git, row_files
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.unpacking import read_members, unpack
from ostinato.infra.serving.weights.codec import decode_payload, encode_payload, whole
from ostinato.tasks.problems import shipped

BOMB_BYTES = 16 << 20
ALLOWED_BYTES = 1 << 20


def write_tar(path: Path, mode: Any, member: tarfile.TarInfo) -> Path:
    with tarfile.open(path, mode) as tar:
        tar.addfile(member, io.BytesIO(b"\0" * member.size))
    return path


def big_file() -> tarfile.TarInfo:
    member = tarfile.TarInfo("top/a.py")
    member.size = BOMB_BYTES
    return member


def long_name() -> tarfile.TarInfo:
    member = tarfile.TarInfo("top/" + "a" * BOMB_BYTES)  # stands in a header, not in a file
    member.size = 1
    return member


def write_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("top/a.py", b"\0" * BOMB_BYTES)
    return path


BOMBS = {
    "gzip": lambda folder: write_tar(folder / "a.tar.gz", "w:gz", big_file()),
    "bzip2": lambda folder: write_tar(folder / "a.tar.bz2", "w:bz2", big_file()),
    "xz": lambda folder: write_tar(folder / "a.tar.xz", "w:xz", big_file()),
    "header": lambda folder: write_tar(folder / "b.tar.gz", "w:gz", long_name()),
    "zip": lambda folder: write_zip(folder / "a.zip"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_with_the_bound_in_the_message(tmp_path: Path, kind: str) -> None:
    bomb = BOMBS[kind](tmp_path)
    assert bomb.stat().st_size < ALLOWED_BYTES // 2
    with pytest.raises(ConfigError, match="unpacks to more than"):
        list(read_members(bomb, ALLOWED_BYTES))
    with pytest.raises(ConfigError, match="unpacks to more than"):
        unpack(bomb, tmp_path / "out", ALLOWED_BYTES)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_what_is_within_the_bound_comes_whole(tmp_path: Path, mode: str) -> None:
    member = tarfile.TarInfo("top/a.py")
    member.size = 1000
    archive = write_tar(tmp_path / "a", mode, member)
    assert list(read_members(archive, 1000)) == [("top/a.py", b"\0" * 1000)]
    unpack(archive, tmp_path / "out", 1000)
    assert (tmp_path / "out/top/a.py").read_bytes() == b"\0" * 1000


def test_a_torn_archive_is_one_error(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(b"\0" * 10_000)[:-9])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_members(archive, ALLOWED_BYTES))


def test_a_payload_of_weights_is_bounded_by_its_version() -> None:
    payload = encode_payload(whole({"w": torch.zeros(1 << 20)}))
    with pytest.raises(ValueError, match="wanted 8 to 1000"):
        decode_payload(payload, {}, 1000)
    header = b"[]".ljust(16)
    listed = zstandard.compress(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="a list as its header"):
        decode_payload(listed, {}, 1000)


def test_a_shipped_set_that_says_too_much_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "set.jsonl.zst"
    bomb.write_bytes(zstandard.compress(b"\0" * (shipped.MAX_BYTES + 1)))
    with pytest.raises(ProblemError, match="wanted at most"):
        shipped.decompress(bomb)


def test_an_object_of_git_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    stored = git.run_git(tmp_path, "--version")
    assert git.run_git(tmp_path, "--version", max_bytes=len(stored)) == stored
    with pytest.raises(ProblemError, match="gave more than 3 bytes"):
        git.run_git(tmp_path, "--version", max_bytes=3)


def test_a_parquet_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MAX_PARQUET_BYTES", 10_000_000)
    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([{"text": "x" * 100_000}] * 200)
    pyarrow.parquet.write_table(table, path)
    assert path.stat().st_size < 100_000
    with pytest.raises(ConfigError, match="unpacks to more than 10000000 bytes"):
        list(row_files.read_rows(path, (".parquet",)))


def test_a_tree_of_git_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    def run(*arguments: str, text: bytes = b"") -> str:
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *arguments], input=text, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    run("init", "-q")
    blob = run("hash-object", "-w", "--stdin", text=b"x = 1\n")
    inner = run("mktree", text=f"100644 blob {blob}\tescaped.py\n".encode())
    entry = b"40000 ..\0" + bytes.fromhex(inner)  # as mktree refuses to write
    tree = run("hash-object", "-t", "tree", "-w", "--literally", "--stdin", text=entry)
    with pytest.raises(ProblemError, match="invalid path"):
        git.read_tree(tmp_path, tree)
