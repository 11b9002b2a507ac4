"""A cache of bounded size encodes again what it dropped."""

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.chunks import cut_chunks
from tests.unit.infra.agent.search.encoders import HashedEncoder
from tests.unit.infra.agent.search.repositories import LEDGER

CHUNKS = cut_chunks("shop/cart.py", LEDGER["shop/cart.py"].decode())


def test_a_full_cache_drops_what_was_used_least_recently() -> None:
    encoder = HashedEncoder()
    cache = ChunkCache(encoder, max_entries=2)
    cache.features(CHUNKS)
    cache.features(CHUNKS[-2:])
    assert len(encoder.encoded) == len(CHUNKS)

    cache.features(CHUNKS[:1])
    assert len(encoder.encoded) == len(CHUNKS) + 1
