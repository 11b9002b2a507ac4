"""The weight chain: a trainer hands each new version of its weights to every engine, through the object store alone.

Enters: named tensors with a version. Leaves: the same tensors bit for bit, or a StorageError. See
`manifest` for the layout of the chain in the store.
"""

from infra.weights.manifest import ChainManifest
from infra.weights.publisher import ChainPublisher
from infra.weights.retention import collect_garbage
from infra.weights.subscriber import ChainSubscriber

__all__ = ["ChainManifest", "ChainPublisher", "ChainSubscriber", "collect_garbage"]
