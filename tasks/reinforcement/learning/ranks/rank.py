"""One rank of a trainer: its copy of the model, its part of each step, its shard of each version.

All ranks hold the same weights, optimiser state and KL reference: they start from the same
checkpoint and take the same steps. The first rank alone saves, commits versions and decides.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ostinato.infra.platform.errors import ConfigError, StorageError, boundary
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import ChainManifest
from ostinato.infra.serving.weights.shard_publisher import (
    OverlappedPublisher,
    PublisherFenced,
    ShardPublisher,
)
from ostinato.infra.serving.weights.shards import share_tensors
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.network.adapters import attach_adapters, trained_adapter
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.training.optimizer import build_optimizer, set_learning_rates
from ostinato.tasks.records import StageRecord
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch
from ostinato.tasks.reinforcement.learning.config import TrainerRequest
from ostinato.tasks.reinforcement.learning.ranks.share import (
    ShareResult,
    ShareWork,
    StepShare,
    checksum_weights,
    sum_rows_k1,
)
from ostinato.tasks.reinforcement.learning.ranks.step_checkpoints import StepCheckpoints, StepState

logger = logging.getLogger(__name__)

ADAPTERS = "adapters"  # in the optimiser's file of a step checkpoint, beside its parts


class RankState(StageRecord):
    """State that ranks compare when they start."""

    step: int
    weights_checksum: str


class TrainerRank:
    """A model, its optimiser and its KL reference, taken up from the newest step checkpoint."""

    def __init__(self, request: TrainerRequest) -> None:
        config = request.config
        self.config = config
        self.step_taken_up = 0
        with boundary(StorageError, f"opening the start of RL, {request.checkpoint_directory}"):
            start = load_checkpoint(Path(request.checkpoint_directory))
        self.spec = start.spec
        self.model = build_trainer_model(self.spec, config.world_size, precision=config.precision)
        self.model.import_weights(start.weights)
        self.model.recompute_layers(config.recompute)
        if config.lora is not None:  # equal on all ranks: the seed draws them
            attach_adapters(self.model, config.lora.rank, config.lora.alpha, seed=0)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        if config.trains_drafts and not self.spec.mtp_depth:
            raise ConfigError(
                f"learning.trains_drafts with {request.checkpoint_directory}, which has no draft layers, "
                "wanted mtp.depth of 1 or more"
            )
        self.model.draft.requires_grad_(config.trains_drafts)
        self.reference: TrainerModel | None = None
        self.reference_step: int | None = None
        self.whole: dict[str, Tensor] = {}
        self.whole_reference: dict[str, Tensor] | None = None
        self.optimizer_state: dict[str, Any] = {}
        if config.objective.kl_coefficient > 0:
            self.reference = build_trainer_model(
                self.spec, config.world_size, precision=config.precision
            )
            self.reference.import_weights(start.weights)
        self._work = ShareWork(self.model, self.optimizer, config, self.reference)
        self.checkpoints = StepCheckpoints(
            Path(request.work_directory),
            self.spec,
            start.tokenizer_path,
            None if config.keep_for_replay else config.keep_checkpoints,
            config.world_size,
        )
        self._restore()

    def state(self, _: None = None) -> RankState:
        """State it resumed from."""
        return RankState(step=self.step_taken_up, weights_checksum=checksum_weights(self.model))

    def gather_weights(self, _: None = None) -> None:
        """Takes a copy of all weights, whole, into `whole`."""
        self.whole = self.model.export_weights()

    def gather_state(self, _: None = None) -> None:
        """As `gather_weights`, and copies of what else a step checkpoint holds."""
        self.gather_weights()
        self.optimizer_state = self.optimizer.state_dict()
        if self.model.adapters:
            adapters = self.model.adapters.state_dict()
            self.optimizer_state[ADAPTERS] = {
                name: tensor.to("cpu", copy=True) for name, tensor in adapters.items()
            }
        if self.reference is not None:
            self.whole_reference = self.reference.export_weights()

    def begin_step(self, steps_taken: int) -> None:
        """Refreshes the KL reference when it is due and sets the rates of the next step."""
        every = self.config.objective.kl_refresh_steps
        if self.reference is not None and every is not None and steps_taken % every == 0:
            self.reference.import_weights(self.model.export_weights())
            self.reference_step = steps_taken
        rates = self.config.optimizer
        scale = warmup_scale(steps_taken, rates.warmup_steps)
        set_learning_rates(
            self.optimizer, muon=scale * rates.muon_learning_rate, adam=scale * rates.learning_rate
        )

    def score_reference(self, batches: Sequence[Microbatch]) -> list[list[float]]:
        """By microbatch and row, k1 to the KL reference."""
        if self.reference is None:
            raise ValueError("kl_coefficient is 0, wanted more: there is no KL reference to score")
        return sum_rows_k1(self.reference, batches)

    def save(self, state: StepState) -> Path:
        """Writes what `gather_state` took as a step checkpoint. Returns its directory."""
        return self.checkpoints.save(
            state,
            self.whole,
            self.optimizer_state,
            self.whole_reference,
            trained_adapter(self.model),
        )

    def take_share(self, share: StepShare) -> ShareResult:
        """Its part of a step. All ranks take theirs at once."""
        return self._work.run(share)

    def _restore(self) -> None:
        loaded = self.checkpoints.load_newest()
        if loaded is None:
            return
        self.step_taken_up = loaded.state.step
        adapters = loaded.optimizer_state.pop(ADAPTERS, None)
        if (adapters is None) != (self.config.lora is None):
            raise StorageError(
                f"step {self.step_taken_up} in {self.checkpoints.directory} was saved "
                f"{'without' if adapters is None else 'with'} adapters, wanted learning.lora as it was then, or "
                "another work directory"
            )
        what = (
            f"taking up step {loaded.state.step} of {self.checkpoints.directory}, which another model or "
            "optimiser wrote; delete that folder to begin anew"
        )
        with boundary(StorageError, what):
            if adapters is None:
                self.model.import_weights(loaded.weights)
            else:  # the frozen weights are those that RL began with
                self.model.adapters.load_state_dict(adapters)
            self.optimizer.load_state_dict(loaded.optimizer_state)
        self.reference_step = loaded.state.reference_step
        if self.reference is not None and loaded.reference_weights is not None:
            self.reference.import_weights(loaded.reference_weights)


class OtherRank(TrainerRank):
    """A rank that follows the first one's orders and publishes its shard."""

    def __init__(self, request: TrainerRequest, objects: ObjectStore, rank: int) -> None:
        super().__init__(request)
        # the first rank would wait long for a shard that does not come
        self.has_failed_upload = False
        self._rank = rank
        self._publisher = ShardPublisher(
            objects, request.chain_id, shard=rank, num_shards=self.config.world_size
        )
        self._uploads = OverlappedPublisher(self._publisher, self._note_failure)

    def join_chain(self, claim: tuple[int, ChainManifest | None]) -> None:
        """Takes up the first rank's epoch and the version that it took up."""
        self._settle()
        self.has_failed_upload = False
        self._publisher.resume(*claim)

    def start_publish(self, version: int) -> None:
        """Uploads its tensors of the copy in the background."""
        self._settle()
        own = own_tensors(self.whole, self._rank, self.config.world_size)
        self._uploads.start(version, own)

    def _note_failure(self, error: BaseException) -> None:
        self.has_failed_upload = not isinstance(error, PublisherFenced)

    def _settle(self) -> None:
        """Waits for the upload before. Its failure is logged only: the first rank decided on that
        version and has gone on.
        """
        try:
            self._uploads.finish()
        except StorageError as error:
            logger.warning("rank=%d the last version was not taken up: %s", self._rank, error)


def be_made(_: TrainerRank, __: None) -> None:
    """Does nothing. As the first order it has all ranks made at once: pipeline stages meet while
    they take up a checkpoint.
    """


def own_tensors(weights: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The tensors that a rank writes."""
    shards = share_tensors({name: tensor.nbytes for name, tensor in weights.items()}, world_size)
    return {name: tensor for name, tensor in weights.items() if shards[name] == rank}


def warmup_scale(steps_taken: int, warmup_steps: int) -> float:
    """Share of the learning rate for the next step: (steps taken + 1) / warm-up, at most 1."""
    return 1.0 if warmup_steps == 0 else min(1.0, (steps_taken + 1) / warmup_steps)
