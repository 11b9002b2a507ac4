"""The service sees each sandbox as it is, in this process and through its socket."""

import asyncio
import json
from pathlib import Path

import pytest

from ostinato.infra.agent.search.server import RemoteSearch, answer, serve
from ostinato.infra.agent.search.service import LocalSearch, SearchService, is_searched
from ostinato.infra.platform.errors import ConfigError, StorageError
from tests.unit.infra.agent.search.encoders import HashedEncoder
from tests.unit.infra.agent.search.repositories import LEDGER

RENAMED = {"shop/mail.py": b"def post_invoice(address):\n    return address\n"}


def new_service() -> SearchService:
    service = SearchService(HashedEncoder())
    service.add_repository("shop", LEDGER)
    return service


def names(service: SearchService, session: str, changes: dict, query: str) -> list[str]:
    return [hit.title for hit in service.search(session, "shop", changes, query, 1)]


def test_each_session_finds_its_own_files() -> None:
    service = new_service()

    assert names(service, "one", RENAMED, "post invoice") == ["def post_invoice(address):"]
    assert names(service, "two", {}, "send receipt") == ["def send_receipt(address, cart):"]


def test_a_file_that_was_put_back_is_found_again() -> None:
    service = new_service()
    names(service, "one", {"shop/mail.py": None, "new.py": b"def send_receipt(): pass\n"}, "x")

    hits = service.search("one", "shop", {}, "send receipt", 9)
    assert {hit.path for hit in hits} == set(LEDGER)


def test_sessions_share_the_encoded_chunks() -> None:
    service = new_service()
    encoded = service.cache.num_encoded
    for session in "abc":
        names(service, session, RENAMED, "invoice")

    assert service.cache.num_encoded == encoded + 1


def test_a_forgotten_session_starts_from_the_pristine_files() -> None:
    service = SearchService(HashedEncoder(), most_sessions=1)
    service.add_repository("shop", LEDGER)
    names(service, "one", RENAMED, "invoice")
    names(service, "two", {}, "invoice")

    assert names(service, "one", {}, "send receipt") == ["def send_receipt(address, cart):"]


def test_a_restarted_service_encodes_nothing_again(tmp_path: Path) -> None:
    for wanted in (7, 0):
        service = SearchService(HashedEncoder(), vectors_path=tmp_path / "vectors.safetensors")
        service.add_repository("shop", LEDGER)
        assert service.cache.num_encoded == wanted


def test_an_unknown_repository_is_named() -> None:
    with pytest.raises(ConfigError, match="'bakery' is not indexed, known: shop"):
        new_service().search("one", "bakery", {}, "bread", 1)


def test_hidden_and_huge_files_take_no_part() -> None:
    assert is_searched("a/b.py", b"")
    assert not is_searched(".git/b.py", b"")
    assert not is_searched("a/b.png", b"")
    assert not is_searched("a.py", b"x" * 1_000_000)


@pytest.fixture
def shop_directory(tmp_path: Path) -> Path:
    for path, content in LEDGER.items():
        (tmp_path / "shop" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shop" / path).write_bytes(content)
    return tmp_path / "shop"


async def test_the_socket_answers_as_the_service_does(tmp_path: Path, shop_directory: Path) -> None:
    stop = asyncio.Event()
    socket = tmp_path / "search.sock"
    server = asyncio.create_task(serve(socket, SearchService(HashedEncoder()), stop))
    while not socket.exists():
        await asyncio.sleep(0.01)
    local = LocalSearch(new_service(), "shop", "one")
    remote = RemoteSearch(socket, "shop", shop_directory, "one")
    wanted = await local.search(RENAMED, "post invoice", 5)
    seen = await remote.search(RENAMED, "post invoice", 5)
    await remote.close()
    stop.set()
    await server

    assert seen == wanted
    assert not socket.exists()


async def test_a_service_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"search service .*nobody"):
        await RemoteSearch(tmp_path / "nobody", "shop", tmp_path, "one").search({}, "x", 1)


@pytest.mark.parametrize(
    ("request_line", "why"),
    [
        (b"{", "JSONDecodeError"),
        (b'{"do": "sing"}', "wanted search or close"),
        (b'{"do": "search"}', "KeyError"),
        (
            json.dumps(
                {"do": "search", "repository": "bakery", "directory": "/nowhere/at/all"}
            ).encode(),
            "does not exist",
        ),
    ],
)
def test_a_bad_request_is_answered_with_its_reason(request_line: bytes, why: str) -> None:
    assert why in answer(new_service(), request_line)["error"]
