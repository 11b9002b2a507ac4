"""Changes laid over an index rank as an index that was built with them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.index import CodeIndex
from tests.unit.infra.agent.search.encoders import HashedEncoder
from tests.unit.infra.agent.search.repositories import CHANGES, FILES, LEDGER, WORDS

QUERIES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join)


def applied(files: dict[str, bytes], changes: dict[str, bytes | None]) -> dict[str, bytes]:
    merged = {**files, **changes}
    return {path: content for path, content in merged.items() if content is not None}


@pytest.mark.parametrize("encoder", [HashedEncoder(), None])
@settings(max_examples=40, deadline=None)
@given(files=FILES, changes=CHANGES, query=QUERIES)
def test_changes_over_an_index_equal_a_rebuilt_one(
    encoder: HashedEncoder | None, files, changes, query: str
) -> None:
    index = CodeIndex(ChunkCache(encoder), files)
    rebuilt = CodeIndex(ChunkCache(encoder), applied(files, changes))

    seen, wanted = index.search(query, 50, changes), rebuilt.search(query, 50)
    assert [hit.score for hit in seen] == pytest.approx([hit.score for hit in wanted], abs=1e-6)
    assert {(hit.path, hit.first_line) for hit in seen} == {
        (hit.path, hit.first_line) for hit in wanted
    }


@settings(max_examples=30, deadline=None)
@given(files=FILES, changes=CHANGES, query=QUERIES)
def test_changes_of_one_search_are_gone_in_the_next(files, changes, query: str) -> None:
    index = CodeIndex(ChunkCache(HashedEncoder()), files)
    before = index.search(query, 50)
    index.search(query, 50, changes)

    assert index.search(query, 50) == before


def test_unchanged_chunks_are_not_encoded_again() -> None:
    encoder = HashedEncoder()
    index = CodeIndex(ChunkCache(encoder), LEDGER)
    num_before = len(encoder.encoded)
    edited = LEDGER["shop/cart.py"].replace(b"json.loads(", b"json.load(")
    index.search("cart", 5, {"shop/cart.py": edited, "shop/mail.py": LEDGER["shop/mail.py"]})

    assert [text.name for text in encoder.encoded[num_before:]] == ["load_cart"]


def test_names_count_more_than_mentions() -> None:
    index = CodeIndex(ChunkCache(None), LEDGER)

    assert [hit.first_line for hit in index.search("total price", 2)] == [10, 1]


def test_a_query_without_known_words_finds_nothing_without_vectors() -> None:
    index = CodeIndex(ChunkCache(None), LEDGER)

    assert index.search("zebra", 5) == []
    assert CodeIndex(ChunkCache(None), {}).search("cart", 5) == []
