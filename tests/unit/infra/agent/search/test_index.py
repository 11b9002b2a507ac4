"""An index that was moved along ranks as one that was built anew; forks go their own way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.index import CodeIndex
from tests.unit.infra.agent.search.encoders import HashedEncoder
from tests.unit.infra.agent.search.repositories import CHANGES, FILES, LEDGER, WORDS

QUERIES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join)


def new_cache() -> ChunkCache:
    return ChunkCache(HashedEncoder())


def applied(files: dict[str, bytes], changes: dict[str, bytes | None]) -> dict[str, bytes]:
    merged = {**files, **changes}
    return {path: content for path, content in merged.items() if content is not None}


@pytest.mark.parametrize("encoder", [HashedEncoder(), None])
@settings(max_examples=20, deadline=None)
@given(files=FILES, edits=st.lists(CHANGES, max_size=4), query=QUERIES, fork_at=st.integers(0, 4))
def test_moved_index_equals_rebuilt(
    encoder: HashedEncoder | None, files, edits, query: str, fork_at: int
) -> None:
    moved = CodeIndex.build(ChunkCache(encoder), files)
    for number, changes in enumerate(edits):
        if number == fork_at:
            moved = moved.fork()
        moved.update(changes)
        files = applied(files, changes)
    rebuilt = CodeIndex.build(ChunkCache(encoder), files)

    assert moved.num_chunks == rebuilt.num_chunks
    seen, wanted = (index.search(query, 50) for index in (moved, rebuilt))
    assert [hit.score for hit in seen] == pytest.approx([hit.score for hit in wanted], abs=1e-6)
    assert {(hit.path, hit.first_line) for hit in seen} == {
        (hit.path, hit.first_line) for hit in wanted
    }


@settings(max_examples=30, deadline=None)
@given(files=FILES, changes=CHANGES, other=CHANGES, query=QUERIES)
def test_forks_do_not_see_one_another(files, changes, other, query: str) -> None:
    base = CodeIndex.build(new_cache(), files)
    before = base.search(query, 50)
    fork = base.fork()
    fork.update(changes)
    fork.fork().update(other)

    assert base.search(query, 50) == before
    assert fork.num_chunks == CodeIndex.build(new_cache(), applied(files, changes)).num_chunks


def test_a_fork_of_forks_stays_shallow_and_right() -> None:
    index = CodeIndex.build(new_cache(), LEDGER)
    for number in range(30):
        index = index.fork()
        index.update({"shop/mail.py": b"def send_receipt(number):\n    return %d\n" % number})

    [hit] = index.search("send receipt", 1)
    assert (hit.path, hit.title) == ("shop/mail.py", "def send_receipt(number):")
    assert index.num_chunks == 5 + 1 + 1


def test_unchanged_chunks_are_not_encoded_again() -> None:
    encoder = HashedEncoder()
    index = CodeIndex.build(ChunkCache(encoder), LEDGER)
    num_before = len(encoder.encoded)
    edited = LEDGER["shop/cart.py"].replace(b"json.loads(", b"json.load(")
    index.update({"shop/cart.py": edited, "shop/mail.py": LEDGER["shop/mail.py"]})

    assert [text.name for text in encoder.encoded[num_before:]] == ["load_cart"]


def test_names_count_more_than_mentions() -> None:
    index = CodeIndex.build(ChunkCache(None), LEDGER)

    assert [hit.first_line for hit in index.search("total price", 2)] == [10, 1]


def test_a_query_without_known_words_finds_nothing_without_vectors() -> None:
    index = CodeIndex.build(ChunkCache(None), LEDGER)

    assert index.search("zebra", 5) == []
    assert CodeIndex.build(ChunkCache(None), {}).search("cart", 5) == []
