"""The trainer of one RL run: its ranks, its place on the weight chain, and how it goes on after a kill.

It is the first rank itself and starts the others, if there are any; it knows neither rollouts nor
the journal.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ostinato.infra.platform.cluster.placement import Room
from ostinato.infra.platform.cluster.rank_group import PATIENCE_SECONDS, RankGroup
from ostinato.infra.platform.errors import ClusterError, TrainingError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import ChainManifest
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.shard_publisher import OverlappedPublisher
from ostinato.infra.serving.weights.shards import Waiting
from ostinato.models.checkpoint.adapter_files import TrainedAdapter
from ostinato.models.network.adapters import trained_adapter
from ostinato.models.spec import ModelSpec
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.advantages import penalize_divergence
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch, deal, even_out
from ostinato.tasks.reinforcement.learning.config import LearningConfig, TrainerRequest
from ostinato.tasks.reinforcement.learning.ranks.rank import (
    OtherRank,
    TrainerRank,
    be_made,
    own_tensors,
)
from ostinato.tasks.reinforcement.learning.ranks.share import ShareResult, StepShare
from ostinato.tasks.reinforcement.learning.ranks.step_checkpoints import StepState
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.update import PolicyUpdate, gather_k1, in_order


class RLTrainer:
    """Takes steps, publishes versions, saves and restores itself. Used by one thread at a time.

    Several ranks take a process for themselves: torch has one set of process groups in each.
    """

    def __init__(
        self,
        request: TrainerRequest,
        objects: ObjectStore,
        room: Room | None = None,
        rank_patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Opens the newest step checkpoint of the work directory, or else the model RL begins with. `room` is for
        several ranks.

        Its weights are on the chain afterwards, as its newest version: the first one of a new chain is 0, and after a
        restart from an older step the numbers go on where the chain ends.
        """
        config = request.config
        self.config: LearningConfig = config
        self.weight_version = -1  # not on the chain yet
        self._nothing = [None] * config.world_size  # argument of orders without one
        self._versions: dict[int, dict[str, torch.Tensor]] = {}  # the newest, by version
        self._ranks = RankGroup(
            request.chain_id,
            functools.partial(OtherRank, request, objects),
            Path(request.work_directory),
            config.parallel_layout,
            request.device,
            room,
            rank_patience_seconds,
        )
        try:
            self._own = self._ranks.run_beside(be_made, None, lambda: TrainerRank(request))
            self._check_ranks_agree()
            self.step = self._own.step_taken_up
            self.spec: ModelSpec = self._own.spec
            self._update = PolicyUpdate(
                self._own.model, self._own.optimizer, config, self._run_shares
            )
            self._publisher = ChainPublisher(
                objects,
                request.chain_id,
                anchor_every=config.anchor_every_versions,
                keep_versions=config.keep_chain_versions,
                num_shards=config.world_size,
                waiting=Waiting(check=self._ranks.check_uploads),
            )
            self._uploads = OverlappedPublisher(self._publisher)
            self._published: ChainManifest | None = None
            self.publish()
        except BaseException:
            self._ranks.close()
            raise

    def train_step(self, samples: Sequence[Sample]) -> StepReport:
        """Takes one optimiser step from the samples and counts it."""
        if not samples:
            raise TrainingError(f"step {self.step + 1} got no samples, wanted at least one group")
        steps_taken = [self.step] * self.config.world_size
        self._ranks.run(self._own, TrainerRank.begin_step, steps_taken)
        advantages, reference_k1_nats = None, 0.0
        if self._own.reference is not None:
            k1_nats = gather_k1(samples, self.config, self._score_reference)
            penalty = penalize_divergence(samples, k1_nats, self.config.objective)
            reference_k1_nats = penalty.mean_k1_nats
            if not self.config.objective.has_kl_loss:
                advantages = penalty.advantages
        report = self._update.step(
            samples,
            step=self.step + 1,
            weight_version=self.weight_version,
            advantages=advantages,
            reference_k1_nats=reference_k1_nats,
            earlier_weights=self._versions,
        )
        self.step += 1
        return report

    def publish(self) -> ChainManifest:
        """Commits the current weights to the chain and waits for it."""
        self.start_publish()
        return self.finish_publish()

    def start_publish(self) -> int:
        """Takes a copy of the weights and commits it in the background. Returns its version.

        The version is one more than the newest on the chain, or that one if it holds these very weights already. An
        upload still running is waited for, and its error raised. What this rank decides all ranks do.
        """
        if self._uploads.is_busy:
            self.finish_publish()
        if not self._publisher.has_epoch:
            last = self._publisher.resume()
            claim = (self._publisher.epoch, last)
            self._ranks.run_beside(OtherRank.join_chain, claim, lambda: None)
        self._ranks.run(self._own, TrainerRank.gather_weights, self._nothing)
        weights = self._own.whole
        newest = self._publisher.last_version
        if newest is not None and self._publisher.holds(weights):
            self._published = self._publisher.last_manifest
            self.weight_version = newest
            self._keep(newest, weights)
            return newest
        version = 0 if newest is None else newest + 1
        self._keep(version, weights)
        own = own_tensors(weights, 0, self.config.world_size)
        self._ranks.run_beside(
            OtherRank.start_publish, version, lambda: self._uploads.start(version, own)
        )
        self.weight_version = version
        return version

    def finish_publish(self) -> ChainManifest:
        """Waits for the newest version to be committed. StorageError when it could not be."""
        self._published = self._uploads.finish() or self._published
        if self._published is None:
            raise TrainingError(
                f"step {self.step}: nothing was published yet, wanted start_publish before"
            )
        return self._published

    def save(self) -> Path:
        """Writes a step checkpoint from which an equal trainer continues, with any number of ranks. Returns its
        directory.
        """
        own = self._own
        state = StepState(
            step=self.step, weight_version=self.weight_version, reference_step=own.reference_step
        )
        self._ranks.run(own, TrainerRank.gather_state, self._nothing)
        return own.save(state)

    def export_weights(self) -> dict[str, torch.Tensor]:
        """A copy of the current weights by canonical name."""
        self._ranks.run(self._own, TrainerRank.gather_weights, self._nothing)
        return self._own.whole

    def export_adapter(self) -> TrainedAdapter | None:
        """A copy of the adapter beside the weights that RL began with. None: all weights are trained."""
        return trained_adapter(self._own.model)

    def close(self) -> None:
        """Waits for the upload under way, ends its thread and the other ranks."""
        try:
            self._uploads.close()
        finally:
            self._ranks.close()

    def _keep(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Keeps the weights of a version in memory for as long as its tokens may be compared. None
        are copied: what is published is a copy already.
        """
        self._versions[version] = weights
        for old in sorted(self._versions)[: -1 - self.config.parity.earlier_versions]:
            del self._versions[old]

    def _run_shares(self, shares: list[StepShare]) -> list[ShareResult]:
        """Each place in data parallelism has a share. Its ranks take it together."""
        places = self.config.parallel_layout.places()
        given = [shares[place.data] for place in places]
        results = self._ranks.run(self._own, TrainerRank.take_share, given)
        self._check_weights(
            [result.weights_checksum for result in results], f"after step {self.step + 1}"
        )
        return [
            replace(
                results[leader],
                num_replayed=sum(
                    r.num_replayed for r, p in zip(results, places, strict=True) if p.data == data
                ),
                num_replaced=sum(
                    r.num_replaced for r, p in zip(results, places, strict=True) if p.data == data
                ),
            )
            for data, leader in enumerate(self.config.parallel_layout.leaders())
        ]

    def _score_reference(self, batches: Sequence[Microbatch]) -> list[list[float]]:
        layout = self.config.parallel_layout
        evened = even_out(batches, layout.data) if layout.expert > 1 else batches
        shares = deal(evened, layout.data)
        given = [[evened[index] for index in shares[place.data]] for place in layout.places()]
        answers = self._ranks.run(self._own, TrainerRank.score_reference, given)
        rows = in_order(shares, [answers[leader] for leader in layout.leaders()])
        return [
            row[: len(batch.sample_indices_B)]
            for batch, row in zip(batches, rows[: len(batches)], strict=True)
        ]

    def _check_ranks_agree(self) -> None:
        states = self._ranks.run(self._own, TrainerRank.state, self._nothing)
        if len({state.step for state in states}) > 1:
            raise ClusterError(f"ranks were taken up at {states}, wanted one step")
        self._check_weights([state.weights_checksum for state in states], "when they were taken up")

    def _check_weights(self, checksums: Sequence[str], when: str) -> None:
        """Ranks that hold the same part of the model hold the same bits."""
        places = self.config.parallel_layout.places()
        parts: dict[tuple[int, int, int], set[str]] = {}
        for place, checksum in zip(places, checksums, strict=True):
            parts.setdefault((place.tensor, place.expert, place.pipeline), set()).add(checksum)
        if any(len(seen) > 1 for seen in parts.values()):
            raise ClusterError(
                f"weights of the ranks {when} have checksums {list(checksums)}, wanted one of each part; the "
                "newest step checkpoint is sound"
            )
