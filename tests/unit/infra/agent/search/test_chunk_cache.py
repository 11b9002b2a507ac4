"""Vectors outlive the process; those of another model do not count."""

from pathlib import Path

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.chunks import cut_chunks
from tests.unit.infra.agent.search.encoders import HashedEncoder
from tests.unit.infra.agent.search.repositories import LEDGER

CHUNKS = cut_chunks("shop/cart.py", LEDGER["shop/cart.py"].decode())


class OtherEncoder(HashedEncoder):
    model_id = "other"


def test_saved_vectors_are_not_made_again(tmp_path: Path) -> None:
    first = ChunkCache(HashedEncoder())
    wanted = first.features(CHUNKS)
    first.save(tmp_path / "vectors.safetensors")
    second = ChunkCache(HashedEncoder())
    second.load(tmp_path / "vectors.safetensors")

    seen = second.features(CHUNKS)
    assert second.num_encoded == 0
    assert all((a.vector == b.vector).all() for a, b in zip(seen, wanted, strict=True))


def test_another_model_makes_its_own_vectors(tmp_path: Path) -> None:
    first = ChunkCache(HashedEncoder())
    first.features(CHUNKS)
    first.save(tmp_path / "vectors.safetensors")
    other = ChunkCache(OtherEncoder())
    other.load(tmp_path / "vectors.safetensors")
    other.features(CHUNKS)

    assert other.num_encoded == len(CHUNKS)


def test_a_full_cache_drops_what_was_used_least_recently() -> None:
    cache = ChunkCache(HashedEncoder(), max_entries=2)
    cache.features(CHUNKS)
    cache.features(CHUNKS[-2:])
    assert cache.num_encoded == len(CHUNKS)

    cache.features(CHUNKS[:1])
    assert cache.num_encoded == len(CHUNKS) + 1
