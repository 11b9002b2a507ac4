"""The weight chain: a trainer hands each new version of its weights to every engine, through the object store alone.

Enters: named tensors with a version. Leaves: the same tensors bit for bit, or a StorageError. See
README.md for the format of the chain in the store.
"""

from infra.weights.manifest import ChainManifest, TensorPart
from infra.weights.overlap import OverlappedPublisher
from infra.weights.publisher import ChainPublisher
from infra.weights.readers import ReaderRecord, list_readers
from infra.weights.retention import collect_garbage
from infra.weights.shard_publisher import ShardPublisher
from infra.weights.shard_writer import PublisherFenced
from infra.weights.shards import share_tensors, split_rows
from infra.weights.subscriber import ChainSubscriber

__all__ = [
    "ChainManifest",
    "ChainPublisher",
    "ChainSubscriber",
    "OverlappedPublisher",
    "PublisherFenced",
    "ReaderRecord",
    "ShardPublisher",
    "TensorPart",
    "collect_garbage",
    "list_readers",
    "share_tensors",
    "split_rows",
]
