"""One rank of an RL run's trainer: its copy of the policy, and its share of each step, version and checkpoint.

All ranks make the same calls (`step`, `publish`, `save`) in the same order. They hold the same weights, optimiser state
and KL reference, because they start from the same checkpoint and take the same steps. With several ranks, the launcher
has opened process groups before (`infra/platform/cluster/rank_group.py`, `infra/platform/training_device.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from ostinato.infra.platform.errors import (
    ClusterError,
    ConfigError,
    StorageError,
    TrainingError,
    boundary,
)
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import ChainManifest
from ostinato.models.checkpoint import OpenCheckpoint, open_checkpoint
from ostinato.models.checkpoint.resume import load_parts
from ostinato.models.network.adapters import attach_adapters, trained_adapter
from ostinato.models.network.build import (
    TrainerModel,
    build_trainer_model,
    copy_weights,
    recompute_layers,
)
from ostinato.models.process_groups import open_process_groups
from ostinato.models.training.optimizer import (
    allocate_state,
    build_optimizer,
    set_learning_rates,
    sharded_state,
)
from ostinato.models.weight_shapes import check_shapes, weight_shapes
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import TrainerRequest
from ostinato.tasks.reinforcement.learning.publishing import VersionPublisher
from ostinato.tasks.reinforcement.learning.ranks import check_copies_agree, gather_over_ranks
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.step import PolicyLearner
from ostinato.tasks.reinforcement.learning.step_checkpoints import StepCheckpoints, StepState


class RLTrainer:
    """Trainer that takes steps, publishes versions, and saves and restores itself. Used by one thread at a time."""

    def __init__(self, request: TrainerRequest, objects: ObjectStore) -> None:
        """Opens the newest step checkpoint of the work directory, or the initial model if there is none.

        Publishes these weights as the chain's newest version. A new chain starts with version 0. After a restart from
        an older step the numbers continue where the chain ends.
        """
        config = self.config = request.config
        open_process_groups(
            world_size=config.world_size, layout=config.parallel_layout, kind=request.device
        )
        with boundary(StorageError, f"opening the initial model {request.checkpoint_directory}"):
            start = open_checkpoint(Path(request.checkpoint_directory))
        self.spec = start.spec
        if config.trains_drafts and not self.spec.mtp_depth:
            raise ConfigError(
                f"learning.trains_drafts with {request.checkpoint_directory}, which has no draft layers, "
                "wanted mtp.depth of 1 or more"
            )
        self._model = self._build_model(start)
        recompute_layers(self._model, config.recompute)
        if config.lora is not None:  # the seed makes them equal on all ranks
            attach_adapters(self._model, config.lora.rank, config.lora.alpha, seed=0)
        self._optimizer = build_optimizer(self._model, config.optimizer)
        self._model.draft.requires_grad_(config.trains_drafts)
        reference = None
        if config.objective.kl_coefficient > 0:
            reference = self._build_model(start)
        self._learner = PolicyLearner(self._model, self._optimizer, config, reference)
        self.steps_taken = self.resumed_version = 0
        self._reference_step: int | None = None
        self._checkpoints = StepCheckpoints(
            Path(request.work_directory),
            start.tokenizer_path,
            None if config.keep_for_replay else config.keep_checkpoints,
            config.world_size,
        )
        self._restore()
        steps = gather_over_ranks(self.steps_taken)
        if len(set(steps)) > 1:
            raise ClusterError(f"ranks resumed at steps {steps}, wanted one step")
        check_copies_agree(self._model, config.parallel_layout, "after resuming")
        self._publisher = VersionPublisher(self._model, objects, request.chain_id, config)
        self.weight_version = -1  # not on the chain yet
        self.publish()

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """Takes one optimiser step on the samples."""
        if not samples:
            raise TrainingError(
                f"step {self.steps_taken + 1} got no samples, wanted at least one group"
            )
        self._refresh_reference()
        rates = self.config.optimizer
        scale = warmup_scale(self.steps_taken, rates.warmup_steps)
        set_learning_rates(
            self._optimizer, muon=scale * rates.muon_learning_rate, adam=scale * rates.learning_rate
        )
        report = self._learner.step(
            samples,
            step=self.steps_taken + 1,
            weight_version=self.weight_version,
            earlier=self._publisher.earlier_weights(),
        )
        self.steps_taken += 1
        return report.model_copy(update={"learning_rate": scale * rates.learning_rate})

    def publish(self) -> ChainManifest:
        """Publishes the current weights and waits until they are committed to the chain."""
        self.start_publish()
        return self._publisher.finish()

    def start_publish(self) -> int:
        """Starts publishing the current weights in the background. Returns their version."""
        self.weight_version = self._publisher.start()
        return self.weight_version

    def finish_publish(self) -> ChainManifest:
        """Waits until the version being published is committed. StorageError if that failed."""
        return self._publisher.finish()

    def save(self) -> Path:
        """Writes a step checkpoint, from which any number of ranks can resume. Returns its directory."""
        parts = self._parts()
        state = StepState(
            step=self.steps_taken,
            weight_version=self.weight_version,
            reference_step=self._reference_step,
            has_adapters=self.config.lora is not None,
            has_optimizer=any(gather_over_ranks(any(self._optimizer.states()))),
        )
        adapter = trained_adapter(self._model)
        return self._checkpoints.save(state, self._model, parts, self._learner.reference, adapter)

    def export_weights(self) -> dict[str, Tensor]:
        """A copy of the current weights by canonical name."""
        return self._model.export_weights()

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank that writes outputs shared by all ranks."""
        return dist.get_rank() == 0

    def export(self, directory: Path, metadata: Mapping[str, str]) -> None:
        """Writes the weights and, with LoRA, the adapter as a checkpoint of the model."""
        self._checkpoints.save_model(directory, self._model, metadata, trained_adapter(self._model))

    def close(self) -> None:
        """Waits for the running upload and ends its thread."""
        self._publisher.close()

    def _build_model(self, start: OpenCheckpoint) -> TrainerModel:
        config = self.config
        model = build_trainer_model(
            self.spec, config.world_size, precision=config.precision, is_fresh=False
        )
        model.read_weights(start.read)
        return model

    def _refresh_reference(self) -> None:
        """Makes the current policy the KL reference when a refresh is due."""
        reference, every = self._learner.reference, self.config.objective.kl_refresh_steps
        if reference is not None and every is not None and self.steps_taken % every == 0:
            copy_weights(self._model, reference)
            self._reference_step = self.steps_taken

    def _restore(self) -> None:
        """Resumes from the newest step checkpoint, if there is one."""
        loaded = self._checkpoints.find_newest()
        if loaded is None:
            return
        state, has_adapters = loaded.state, self.config.lora is not None
        if state.has_adapters != has_adapters:
            raise StorageError(
                f"step {state.step} in {self._checkpoints.directory} was saved "
                f"{'with' if state.has_adapters else 'without'} adapters, wanted the same learning.lora as then, or "
                "another work directory"
            )
        self.steps_taken, self._reference_step = state.step, state.reference_step
        self.resumed_version = state.weight_version
        what = (
            f"resuming from step {state.step} of {self._checkpoints.directory}, which another model or "
            "optimiser wrote; delete that folder to start again"
        )
        with boundary(StorageError, what):
            check_shapes(self.spec, weight_shapes(loaded.weights.spec))
            if state.has_optimizer:
                allocate_state(self._optimizer, self._learner.gradients)
            if not has_adapters:  # with adapters the frozen weights stay those of the initial model
                self._model.read_weights(loaded.weights.read)
            if parts := self._parts():
                load_parts(loaded.parts, parts)
        reference = self._learner.reference
        if reference is not None and loaded.reference is not None:
            reference.read_weights(loaded.reference.read)

    def _parts(self) -> list[ShardedTensor]:
        """This rank's shards of the optimiser's state and of adapters."""
        adapters = self._model.moving_tensors() if self.config.lora is not None else {}
        return sharded_state(self._model, self._optimizer, adapters)


def warmup_scale(steps_taken: int, warmup_steps: int) -> float:
    """Factor on the learning rate of the next step: (steps taken + 1) / warm-up steps, at most 1."""
    return 1.0 if warmup_steps == 0 else min(1.0, (steps_taken + 1) / warmup_steps)
