"""One rank's share in publishing versions: the tensors that it uploads and those that it keeps for parity.

No rank holds the whole model: `share_tensors` assigns whole tensors to ranks, and each rank exports, uploads and keeps
its own. A rank whose upload fails reports it to the others through the process group's store, so that all of them raise
and can try again.
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
from ostinato.models.decode.weights import in_precision
from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.weight_shapes import weight_shapes
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.reinforcement.learning.parity import EarlierWeights
from ostinato.tasks.reinforcement.learning.ranks import broadcast_from_first, gather_over_ranks


class VersionPublisher:
    """Publisher of one rank. All ranks make the same calls."""

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
        self._newest: ChainManifest | None = None  # of the chain, the same on all ranks
        self._newest_version: int | None = None
        self._kept: dict[int, dict[str, Tensor]] = {}  # this rank's tensors of the newest versions

    def start(self) -> int:
        """Copies this rank's tensors and uploads the copy in the background. Returns the version.

        The version is one more than the newest on the chain, or the newest if it already holds the same weights. An
        upload that still runs is waited for, and its error is raised.
        """
        if self._uploads.is_busy:
            self.finish()
        self._join_chain()
        precision = self._config.publish_precision
        own = {
            name: in_precision(name, tensor, precision)
            for name, tensor in self._model.export_weights(self._own).items()
        }
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
        """Waits until the version being uploaded is committed. If that fails, all ranks raise StorageError."""
        self._newest = self._uploads.finish() or self._newest
        if self._newest is None:
            raise TrainingError("nothing was published yet, wanted a call of start() before")
        return self._newest

    def close(self) -> None:
        """Waits for the running upload and ends its thread."""
        self._uploads.close()

    def earlier_weights(self) -> EarlierWeights:
        """Kept versions, each with a function that reads its tensors. All ranks call it together."""
        return {version: functools.partial(self._read, version) for version in self._kept}

    def _join_chain(self) -> None:
        """At the start and after a failure, has the first rank claim the chain and all ranks learn its newest version."""
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
        """Keeps a version as long as its tokens may be compared."""
        self._kept[version] = own
        earlier = self._config.parity.earlier_versions
        for old in sorted(self._kept)[: -1 - earlier if earlier else None]:
            del self._kept[old]

    def _read(self, version: int, name: str) -> Tensor:
        """A tensor of a kept version, broadcast by the rank that keeps it."""
        owner = self._owners[name]
        if owner == self._rank:
            tensor = self._kept[version][name].to(current_device(), torch.float32)
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
