"""The weight chain: a trainer hands each new version of its weights to every engine, through the object store alone.

See README.md for the format of the chain in the store.
"""

from ostinato.infra.serving.chain_manifest import ChainManifest
from ostinato.infra.serving.weights.overlap import OverlappedPublisher
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.readers import ReaderRecord, list_readers
from ostinato.infra.serving.weights.retention import collect_garbage
from ostinato.infra.serving.weights.shard_publisher import ShardPublisher
from ostinato.infra.serving.weights.shard_writer import PublisherFenced
from ostinato.infra.serving.weights.shards import share_tensors
from ostinato.infra.serving.weights.subscriber import ChainSubscriber

__all__ = [
    "ChainManifest",
    "ChainPublisher",
    "ChainSubscriber",
    "OverlappedPublisher",
    "PublisherFenced",
    "ReaderRecord",
    "ShardPublisher",
    "collect_garbage",
    "list_readers",
    "share_tensors",
]
