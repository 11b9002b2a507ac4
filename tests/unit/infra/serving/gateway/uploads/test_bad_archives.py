"""Archives that are no good, sent to a gateway over a socket: each is one typed refusal that leaves nothing."""

import asyncio
import gzip
import io
import random
import stat
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.unpacking import stream_members
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.limits import receive_archive
from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.uploads import archive as archives
from tests.fakes.toy_gateway import Toy

HEADERS = {"Authorization": "Bearer key-of-team"}
PATH = "/v1/repositories"
GOOD = {"pkg/a.py": b"x = 1\n" * 50, "tests/test_a.py": b"def test_a():\n    assert True\n"}
KIB, MIB = 1 << 10, 1 << 20


def tar_of(*members: tuple[str, bytes, int, str]) -> bytes:
    """Name, content, type and target of each entry, in a tar.gz."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content, kind, target in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = bytes([kind]), target, len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def files_tar(files: dict[str, bytes]) -> bytes:
    return tar_of(*((name, content, tarfile.REGTYPE[0], "") for name, content in files.items()))


def zip_of(files: dict[str, bytes], mode: int = stat.S_IFREG | 0o644) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            opened.writestr(info, content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def entry(kind: bytes, name: str = "pkg/x", target: str = "") -> bytes:
    return tar_of((name, b"", kind[0], target))


def encrypted_zip() -> bytes:
    packed = bytearray(zip_of({"a.py": b"x"}))
    for mark, flags_at in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        packed[packed.index(mark) + flags_at] |= 1
    return bytes(packed)


def invalid(body: bytes, words: str) -> tuple[bytes, int, str, str]:
    return body, 400, "invalid_archive", words


def large(body: bytes, words: str) -> tuple[bytes, int, str, str]:
    return body, 413, "archive_too_large", words


BAD: dict[str, Callable[[], tuple[bytes, int, str, str]]] = {
    "nothing": lambda: (b"", 415, "unsupported_archive", "wanted a .tar.gz or a .zip"),
    "text": lambda: (b"hello", 415, "unsupported_archive", "wanted a .tar.gz or a .zip"),
    "no tar in gzip": lambda: invalid(gzip.compress(b"hello" * 500), "cannot be read"),
    "torn tar": lambda: invalid(files_tar(GOOD)[:-20], "cannot be read"),
    "torn zip": lambda: invalid(zip_of(GOOD)[:-20], "cannot be read"),
    "encrypted": lambda: invalid(encrypted_zip(), "encrypted"),
    "empty tar": lambda: invalid(files_tar({}), "holds no files"),
    "only rubbish": lambda: invalid(files_tar({".git/HEAD": b"x"}), "holds no files"),
    "above": lambda: invalid(files_tar({"../x.py": b""}), "wanted a path inside"),
    "within and above": lambda: invalid(files_tar({"a/../../x.py": b""}), "wanted a path inside"),
    "absolute": lambda: invalid(files_tar({"/tmp/ostinato-escaped.py": b""}), "wanted a path inside"),
    "above in zip": lambda: invalid(zip_of({"../x.py": b""}), "wanted a path inside"),
    "absolute in zip": lambda: invalid(zip_of({"/tmp/ostinato-escaped.py": b""}), "wanted a path inside"),
    "long name": lambda: invalid(files_tar({"a" * 256: b""}), "wanted a path inside"),
    "no utf-8": lambda: invalid(files_tar({"a\udcff.py": b""}), "wanted a path inside"),
    "symbolic link": lambda: invalid(entry(tarfile.SYMTYPE, target="/etc/passwd"), "is a link"),
    "hard link": lambda: invalid(entry(tarfile.LNKTYPE, target="pkg/a.py"), "is a link"),
    "link in zip": lambda: invalid(zip_of({"x": b"/etc"}, stat.S_IFLNK | 0o777), "is a link"),
    "device": lambda: invalid(entry(tarfile.CHRTYPE), "is a device"),
    "pipe": lambda: invalid(entry(tarfile.FIFOTYPE), "is a device"),
    "pipe in zip": lambda: invalid(zip_of({"x": b""}, stat.S_IFIFO | 0o644), "is a device"),
    "twice": lambda: invalid(zip_of({"a.py": b"", "./a.py": b""}), "comes twice"),
    "below a file": lambda: invalid(files_tar({"a": b"", "a/b.py": b""}), "below a file"),
    "a folder and a file": lambda: invalid(files_tar({"a/b.py": b"", "a": b""}), "comes twice"),
    "bomb": lambda: large(files_tar({f"{n}.py": b"\0" * 256 * KIB for n in range(5)}), "unpacks to more"),
    "bomb in zip": lambda: large(zip_of({f"{n}": b"\0" * 256 * KIB for n in range(5)}), "unpacks to more"),
    "large file": lambda: large(files_tar({"a.py": b"\0" * (256 * KIB + 1)}), "has more than 262144"),
    "many": lambda: large(files_tar({f"{n}": b"" for n in range(201)}), "more than 200 entries"),
    "many in zip": lambda: large(zip_of({f"{n}": b"" for n in range(201)}), "more than 200 entries"),
    "zip of names": lambda: large(zip_of({f"{n}" * 40: b"" for n in range(2_000)}), "directory of"),
    "many folders": lambda: large(files_tar({f"{n}/a/a/x": b"" for n in range(100)}), "folders"),
    "large": lambda: large(b"\x1f\x8b" + b"\0" * archives.MAX_ARCHIVE_BYTES, "wanted at most 16777216"),
    "over the quota": lambda: (
        files_tar({"a.py": random.Random(0).randbytes(250_000)}), 403, "upload_quota_exceeded",
        "wanted at most 204800",
    ),
}  # fmt: skip


def left(toy: Toy, directory: Path) -> list[str]:
    """What lies in the folder of uploads, but for the folders of tenants."""
    return [str(path) for path in (directory / "uploads").glob("*/*")]


@pytest.mark.asyncio
async def test_each_bad_archive_is_one_typed_refusal_over_a_socket(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", MIB)
    monkeypatch.setattr(archives, "MAX_FILE_BYTES", 256 * KIB)
    monkeypatch.setattr(archives, "MAX_ENTRIES", 200)
    seen, wanted = {}, {}
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        httpx2.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client,
    ):
        for name, make in BAD.items():
            body, status, code, words = make()
            answer = await client.post(PATH, content=body)
            error = answer.json()["error"]
            assert words in error["message"], (name, error)
            assert str(tmp_path) not in answer.text, name
            assert error["type"] == "invalid_request_error", name
            seen[name], wanted[name] = (answer.status_code, error["code"]), (status, code)
        listed = (await client.get(PATH)).json()
    assert seen == wanted
    assert listed == {"object": "list", "data": []}
    assert left(toy, tmp_path) == []
    assert not Path("/tmp/ostinato-escaped.py").exists()


async def endless() -> AsyncIterator[bytes]:
    for _ in range(400):
        yield b"\x1f\x8b" + b"\0" * 65_534


@pytest.mark.asyncio
async def test_a_body_without_a_length_ends_at_the_bound(toy: Toy, tmp_path: Path) -> None:
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        httpx2.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client,
    ):
        answer = await client.post(PATH, content=endless())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "archive_too_large")
    assert left(toy, tmp_path) == []


@pytest.mark.asyncio
async def test_an_archive_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ApiError) as refused:
        await receive_archive(Headers(), never, tmp_path / "a", seconds=0.01)
    assert refused.value.status_code == 408


@pytest.mark.asyncio
async def test_a_tenant_sends_two_at_once(toy: Toy) -> None:
    temporary_archive = toy.context.uploads.temporary_archive
    with temporary_archive("team"), temporary_archive("team"), temporary_archive("private"):
        async with toy.client() as client:
            answer = await client.post(PATH, content=files_tar(GOOD))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_uploads")
    assert "retry-after" in answer.headers


def test_damaged_bytes_are_always_the_same_kind_of_error(tmp_path: Path) -> None:
    draw = random.Random(7)
    path = tmp_path / "damaged"
    whole = [files_tar(GOOD), gzip.decompress(files_tar(GOOD)), zip_of(GOOD)]
    for turn in range(600):
        damaged = bytearray(whole[turn % 3])
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(len(damaged))] = draw.choice((0, 255, draw.randrange(256)))
        path.write_bytes(damaged)
        try:
            for member in stream_members(path, MIB, max_entries=100):
                b"".join(member.content)
        except ConfigError:
            continue
