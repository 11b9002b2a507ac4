"""Failures of the machine under the object store: full disk, closed port, killed writer."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import Settings

_WRITER = """
import sys
from ostinato.infra.platform.objects import ObjectStore
objects = ObjectStore.from_url(sys.argv[1])
print("ready", flush=True)
while True:
    for byte in (b"a", b"b"):
        objects.put_bytes("hot", byte * 3_000_000)
"""


def test_full_disk_is_one_clear_message() -> None:
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        full.write_bytes(b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC

    class FullBackend:
        def write(self, key: str, data: bytes) -> None:
            full.write_bytes(data)

    objects = ObjectStore("file:///full", FullBackend())  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        StorageError, match="cannot put key in file:///full: the disk is full; free"
    ):
        objects.put_bytes("key", b"x" * 100_000)


def test_closed_port_of_s3_fails_within_seconds_naming_url_and_setting() -> None:
    settings = Settings(
        s3_endpoint_url="http://127.0.0.1:9",
        s3_region="eu-west-1",
        s3_access_key_id="test",
        s3_secret_access_key=SecretStr("test"),
    )
    objects = ObjectStore.from_url("s3://bucket/prefix", settings)
    began = time.monotonic()

    with pytest.raises(StorageError, match=r"s3://bucket/prefix.*OSTINATO_S3_ENDPOINT_URL"):
        objects.put_bytes("key", b"x")

    assert time.monotonic() - began < 60


def test_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    objects = ObjectStore.from_url(f"file://{tmp_path}/taken")

    with pytest.raises(StorageError, match="cannot put key"):
        objects.put_bytes("key", b"x")


def test_killed_writer_leaves_a_whole_object_and_lists_no_debris(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, url], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    objects = ObjectStore.from_url(url)
    while not objects.exists("hot"):
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()

    assert objects.get_bytes("hot") in (b"a" * 3_000_000, b"b" * 3_000_000)
    assert objects.list() == ["hot"]


def test_bytes_and_names_are_flushed_before_a_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []
    flush, target = os.fsync, tmp_path / "objects" / "a" / "b" / "object"

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        name = "bytes" if path.name.startswith(".put-") else path.relative_to(tmp_path).as_posix()
        flushed.append((name, target.exists()))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    source = tmp_path / "source"
    source.write_bytes(b"x")
    ObjectStore.from_url(f"file://{tmp_path}/objects").put_file("a/b/object", source)
    folders = ["objects/a/b", "objects/a", "objects", "."]
    assert flushed == [("bytes", False), *((folder, True) for folder in folders)]


def test_objects_are_for_their_owner_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    store = ObjectStore.from_url(f"file://{tmp_path}/objects")
    store.put_bytes("bytes", b"x")
    store.put_new("new", b"x")
    store.put_file("file", source)
    for name in ("bytes", "new", "file"):
        assert (tmp_path / "objects" / name).stat().st_mode & 0o777 == 0o600
