"""One rank's part in publishing versions: the tensors that it writes, and those that it keeps for parity.

No rank holds the whole model: a version is shared out by whole tensors, as `share_tensors` deals them, and each rank
exports, uploads and keeps its own. A rank whose upload fails tells the others through the store in which they met, so
that all of them raise and all of them may try again.
"""

import functools
import uuid

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ostinato.infra.platform.errors import StorageError, TrainingError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import ChainManifest
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.shard_publisher import OverlappedPublisher, ShardPublisher
from ostinato.infra.serving.weights.shards import Waiting, share_tensors
from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.weight_shapes import weight_shapes
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.reinforcement.learning.parity import EarlierWeights
from ostinato.tasks.reinforcement.learning.ranks import broadcast_from_first, gather_over_ranks


class VersionPublisher:
    """Publishes the weights of one model, with the other ranks' publishers. All ranks make the same calls."""

    def __init__(
        self, model: TrainerModel, objects: ObjectStore, chain_id: str, config: LearningConfig
    ) -> None:
        self._model, self._config = model, config
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        shapes = weight_shapes(model.spec)
        sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
        self._owners = share_tensors(sizes, ranks)
        self._own = {name for name, owner in self._owners.items() if owner == self._rank}
        self._epoch = 0
        self._failures = PrefixStore(broadcast_from_first(uuid.uuid4().hex), _get_default_store())
        waiting = Waiting(check=self._check_others)
        self._first: ChainPublisher | None = None
        if self._rank == 0:
            self._first = ChainPublisher(
                objects,
                chain_id,
                anchor_every=config.anchor_every_versions,
                keep_versions=config.keep_chain_versions,
                num_shards=ranks,
                waiting=waiting,
            )
        self._publisher = self._first or ShardPublisher(
            objects, chain_id, shard=self._rank, num_shards=ranks, waiting=waiting
        )
        self._uploads = OverlappedPublisher(self._publisher, self._tell_others)
        self._newest: ChainManifest | None = None  # of the chain, as all ranks know it
        self._newest_version: int | None = None
        self._kept: dict[int, dict[str, Tensor]] = {}  # this rank's tensors of the newest versions

    def start(self) -> int:
        """Takes a copy of this rank's tensors and uploads it in the background. Returns the version.

        It is one more than the newest on the chain, or that one if it holds these very weights already. An upload
        still running is waited for, and its error raised.
        """
        if self._uploads.is_busy:
            self.finish()
        self._join_chain()
        own = self._model.export_weights(self._own)
        version = 0 if self._newest_version is None else self._newest_version + 1
        if all(gather_over_ranks(self._publisher.holds(self._newest, own, len(self._owners)))):
            assert self._newest is not None
            version = self._newest.version
        else:
            self._uploads.start(version, own)
            self._newest_version = version
        self._keep(version, own)
        return version

    def finish(self) -> ChainManifest:
        """Waits for the version under way to be committed. StorageError, on all ranks, when it could not be."""
        self._newest = self._uploads.finish() or self._newest
        if self._newest is None:
            raise TrainingError("nothing was published yet, wanted start() before")
        return self._newest

    def close(self) -> None:
        """Waits for the upload under way and ends its thread."""
        self._uploads.close()

    def earlier_weights(self) -> EarlierWeights:
        """Versions that are kept, with what reads their weights on all ranks together."""
        return {version: functools.partial(self._read, version) for version in self._kept}

    def _join_chain(self) -> None:
        """At the start and after a failure the first rank claims the chain; all take up its newest version."""
        claim = None
        if self._first is not None and not self._first.has_epoch:
            manifest = self._first.resume()
            claim = self._first.epoch, manifest, self._first.last_version
        claim = broadcast_from_first(claim)
        if claim is None:
            return
        self._epoch, self._newest, self._newest_version = claim
        if isinstance(self._publisher, ShardPublisher):
            self._publisher.resume(self._epoch, self._newest)

    def _keep(self, version: int, own: dict[str, Tensor]) -> None:
        """Keeps a version for as long as its tokens may be compared."""
        self._kept[version] = own
        earlier = self._config.parity.earlier_versions
        for old in sorted(self._kept)[: -1 - earlier if earlier else None]:
            del self._kept[old]

    def _read(self, version: int, name: str) -> Tensor:
        """A tensor of a version that is kept, from the rank that keeps it."""
        owner = self._owners[name]
        if owner == self._rank:
            tensor = self._kept[version][name].to(current_device())
        else:
            shape = weight_shapes(self._model.spec)[name]
            tensor = torch.empty(shape, device=current_device())
        if dist.get_world_size() > 1:
            dist.broadcast(tensor, owner)
        return tensor

    def _tell_others(self, error: BaseException) -> None:
        self._failures.set(str(self._epoch), f"by rank [{self._rank}]: {error}")

    def _check_others(self) -> None:
        if self._failures.check([str(self._epoch)]):
            reason = self._failures.get(str(self._epoch)).decode()
            raise StorageError(f"a shard of the version could not be uploaded {reason}")
