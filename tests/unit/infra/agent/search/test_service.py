"""The service sees each sandbox as it is."""

from ostinato.infra.agent.search.index import LocalSearch, SearchService, is_searched
from tests.unit.infra.agent.search.encoders import HashedEncoder
from tests.unit.infra.agent.search.repositories import LEDGER

RENAMED = {"shop/mail.py": b"def post_invoice(address):\n    return address\n"}


def new_search() -> LocalSearch:
    return LocalSearch(SearchService(HashedEncoder()), "shop", LEDGER)


def names(search: LocalSearch, changes: dict, query: str) -> list[str]:
    return [hit.title for hit in search.search(changes, query, 1)]


def test_each_sandbox_finds_its_own_files() -> None:
    search = new_search()

    assert names(search, RENAMED, "post invoice") == ["def post_invoice(address):"]
    assert names(search, {}, "send receipt") == ["def send_receipt(address, cart):"]


def test_a_file_that_was_put_back_is_found_again() -> None:
    search = new_search()
    names(search, {"shop/mail.py": None, "new.py": b"def send_receipt(): pass\n"}, "x")

    assert {hit.path for hit in search.search({}, "send receipt", 9)} == set(LEDGER)


def test_sandboxes_share_the_encoded_chunks() -> None:
    encoder = HashedEncoder()
    service = SearchService(encoder)
    names(LocalSearch(service, "shop", LEDGER), {}, "invoice")
    num_before = len(encoder.encoded)
    for _ in range(3):
        names(LocalSearch(service, "shop", LEDGER), RENAMED, "invoice")

    assert len(encoder.encoded) == num_before + 1


def test_hidden_and_huge_files_take_no_part() -> None:
    assert is_searched("a/b.py", b"")
    assert not is_searched(".git/b.py", b"")
    assert not is_searched("a/b.png", b"")
    assert not is_searched("a.py", b"x" * 1_000_000)
