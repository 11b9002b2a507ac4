"""The service sees each sandbox as it is."""

import pytest

from ostinato.infra.agent.search.service import SearchService, is_searched
from ostinato.infra.platform.errors import ConfigError
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


def test_an_unknown_repository_is_named() -> None:
    with pytest.raises(ConfigError, match="'bakery' is not indexed, known: shop"):
        new_service().search("one", "bakery", {}, "bread", 1)


def test_hidden_and_huge_files_take_no_part() -> None:
    assert is_searched("a/b.py", b"")
    assert not is_searched(".git/b.py", b"")
    assert not is_searched("a/b.png", b"")
    assert not is_searched("a.py", b"x" * 1_000_000)
