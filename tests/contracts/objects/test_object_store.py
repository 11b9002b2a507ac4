"""What every object store keeps: round trips, atomic puts, honest listings, checksums."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.objects import ObjectStore, checksum_bytes, checksum_file


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(300_000)], ids=["empty", "byte", "large"])
def test_put_bytes_then_get_gives_the_same(objects: ObjectStore, data: bytes) -> None:
    checksum = objects.put_bytes("a/b/c.bin", data)

    assert checksum == checksum_bytes(data)
    assert objects.get_bytes("a/b/c.bin", checksum=checksum) == data


def test_put_file_then_get_file_gives_the_same(objects: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(os.urandom(100_000))

    checksum = objects.put_file("file", source)
    copy = objects.get_file("file", tmp_path / "deep" / "copy.bin", checksum=checksum)

    assert checksum == checksum_file(source)
    assert copy.read_bytes() == source.read_bytes()


def test_put_on_a_taken_key_replaces(objects: ObjectStore) -> None:
    objects.put_bytes("key", b"first, longer")
    objects.put_bytes("key", b"second")

    assert objects.get_bytes("key") == b"second"


def test_put_new_of_many_callers_one_wins(objects: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda number: objects.put_new("fence", b"%d" % number), range(8)))

    assert won.count(True) == 1
    assert objects.get_bytes("fence") == b"%d" % won.index(True)


def test_concurrent_puts_readers_see_whole_objects_only(objects: ObjectStore) -> None:
    bodies = [bytes([number]) * 200_000 for number in range(4)]
    objects.put_bytes("hot", bodies[0])
    with ThreadPoolExecutor(4) as threads:
        writes = [threads.submit(objects.put_bytes, "hot", body) for body in bodies * 3]
        reads = [threads.submit(objects.get_bytes, "hot") for _ in range(12)]

    assert all(write.result() for write in writes)
    assert all(read.result() in bodies for read in reads)


def test_list_gives_sorted_keys_by_string_prefix(objects: ObjectStore) -> None:
    for key in ("a/2", "a/1", "ab", "b/x/y"):
        objects.put_bytes(key, b"")

    assert objects.list() == ["a/1", "a/2", "ab", "b/x/y"]
    assert objects.list("a") == ["a/1", "a/2", "ab"]
    assert objects.list("a/") == ["a/1", "a/2"]
    assert objects.list("b/x/") == ["b/x/y"]
    assert objects.list("nothing/here") == []


def test_sizes_and_times_are_those_of_a_folder(objects: ObjectStore) -> None:
    began = time.time()
    objects.put_bytes("chains/a/1.bin", b"12345")
    objects.put_bytes("chains/a/deep/2.bin", b"")
    objects.put_bytes("chains/ab.bin", b"other")

    assert objects.sizes("chains/a/") == {"chains/a/1.bin": 5, "chains/a/deep/2.bin": 0}
    times = objects.changed_at("chains/a/")
    assert times.keys() == {"chains/a/1.bin", "chains/a/deep/2.bin"}
    # S3 tells whole seconds
    assert all(began - 2 < at < time.time() + 2 for at in times.values())
    assert objects.sizes("nothing/") == objects.changed_at("nothing/") == {}


def test_delete_is_idempotent_and_seen_at_once(objects: ObjectStore) -> None:
    objects.put_bytes("key", b"x")
    assert objects.exists("key")

    objects.delete("key")
    objects.delete("key")

    assert not objects.exists("key")
    assert objects.list() == []


def test_exists_of_a_folder_is_false(objects: ObjectStore) -> None:
    objects.put_bytes("folder/key", b"x")

    assert not objects.exists("folder")


def test_get_with_another_checksum_names_key_seen_and_wanted(
    objects: ObjectStore, tmp_path: Path
) -> None:
    wanted = objects.put_bytes("weights/1", b"right")
    objects.put_bytes("weights/1", b"wrong")
    seen = checksum_bytes(b"wrong")

    with pytest.raises(StorageError, match=f"weights/1.*corrupt.*{seen}.*{wanted}"):
        objects.get_bytes("weights/1", checksum=wanted)
    with pytest.raises(StorageError, match="corrupt"):
        objects.get_file("weights/1", tmp_path / "copy", checksum=wanted)
    assert list(tmp_path.glob("copy*")) == []


def test_get_of_a_missing_object_names_url_and_key(objects: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such object") as caught:
        objects.get_bytes("not/there")

    assert objects.url in str(caught.value)
    assert "not/there" in str(caught.value)
    with pytest.raises(StorageError, match="no such object"):
        objects.get_file("not/there", tmp_path / "copy")


@pytest.mark.parametrize("key", ["", "/absolute", "../outside", "a/../../b"])
def test_key_that_leaves_the_store_is_refused(objects: ObjectStore, key: str) -> None:
    with pytest.raises(ValueError, match="object key"):
        objects.put_bytes(key, b"x")


@pytest.mark.parametrize("url", ["", "objects", "file://relative/path", "http://host/x", "s3://"])
def test_wrong_url_says_what_is_wanted(url: str) -> None:
    with pytest.raises(ConfigError, match="wanted file:///absolute/path or s3://bucket/prefix"):
        ObjectStore.from_url(url)
