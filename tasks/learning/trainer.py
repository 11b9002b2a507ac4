"""The trainer of one RL run: a model, its optimiser, its place on the weight chain, and how it goes on after a kill.

Owns RLTrainer. Enters: a TrainerRequest, then batches of samples. Leaves: step reports, versions
on the weight chain, step checkpoints. It starts no process and knows neither rollouts nor the
journal.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from infra.errors import StorageError, TrainingError, boundary
from infra.objects import ObjectStore
from infra.weights import ChainManifest, ChainPublisher, OverlappedPublisher
from models.build import TrainerModel, build_trainer_model
from models.checkpoint import load_checkpoint
from models.optimizer import OptimizerConfig, build_optimizer, set_learning_rates
from models.spec import ModelSpec
from tasks.learning.advantages import penalize_divergence
from tasks.learning.config import LearningConfig, PolicyOptimizerConfig, TrainerRequest
from tasks.learning.report import StepReport
from tasks.learning.step_checkpoints import StepCheckpoints, StepState
from tasks.learning.update import PolicyUpdate, sum_k1
from tasks.records import Sample


class RLTrainer:
    """Takes steps, publishes versions, saves and restores itself. Used by one thread at a time."""

    def __init__(
        self,
        request: TrainerRequest,
        objects: ObjectStore,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Opens the newest step checkpoint of the work directory, or else the model RL begins with.

        Its weights are on the chain afterwards, as its newest version: the first one of a new chain is 0, and after a
        restart from an older step the numbers go on where the chain ends.
        """
        config = request.config
        self.config: LearningConfig = config
        self.step = 0
        self.weight_version = -1  # not on the chain yet
        with boundary(StorageError, f"opening the start of RL, {request.checkpoint_directory}"):
            start = load_checkpoint(Path(request.checkpoint_directory))
        self.spec: ModelSpec = start.spec
        self._model = build_trainer_model(self.spec)
        self._model.import_weights(start.weights)
        self._optimizer = build_optimizer(self._model, _optimizer_config(config.optimizer))
        self._update = PolicyUpdate(self._model, self._optimizer, config, clock)
        self._reference: TrainerModel | None = None
        self._reference_step: int | None = None
        if config.objective.kl_coefficient > 0:
            self._reference = build_trainer_model(self.spec)
            self._reference.import_weights(start.weights)
        self._checkpoints = StepCheckpoints(
            Path(request.work_directory), self.spec, start.tokenizer_path, config.keep_checkpoints
        )
        self._restore()
        self._publisher = ChainPublisher(
            objects,
            request.chain_id,
            anchor_every=config.anchor_every_versions,
            keep_versions=config.keep_chain_versions,
        )
        self._uploads = OverlappedPublisher(self._publisher)
        self._published: ChainManifest | None = None
        self._publisher.resume()
        self.publish()

    def train_step(self, samples: Sequence[Sample]) -> StepReport:
        """Takes one optimiser step from the samples and counts it."""
        if not samples:
            raise TrainingError(f"step {self.step + 1} got no samples, wanted at least one group")
        self._refresh_reference()
        self._set_learning_rates()
        advantages, reference_k1_nats = None, 0.0
        if self._reference is not None:
            k1_nats = sum_k1(self._reference, samples, self.config)
            penalty = penalize_divergence(samples, k1_nats, self.config.objective.kl_coefficient)
            advantages, reference_k1_nats = penalty.advantages, penalty.mean_k1_nats
        report = self._update.step(
            samples,
            step=self.step + 1,
            weight_version=self.weight_version,
            advantages=advantages,
            reference_k1_nats=reference_k1_nats,
        )
        self.step += 1
        return report

    def publish(self) -> ChainManifest:
        """Commits the current weights to the chain and waits for it."""
        self.start_publish()
        return self.finish_publish()

    def start_publish(self) -> int:
        """Takes a copy of the weights and commits it in the background; returns its version.

        The version is one more than the newest on the chain, or that one if it holds these very weights already. An
        upload still running is waited for, and its error raised.
        """
        if self._uploads.is_busy:
            self.finish_publish()
        weights = self._model.export_weights()
        newest = self._publisher.last_version
        if newest is not None and self._publisher.holds(weights):
            self._published = self._publisher.last_manifest
            self.weight_version = newest
            return newest
        version = 0 if newest is None else newest + 1
        self._uploads.start(version, weights)
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
        """Writes a step checkpoint from which an equal trainer continues; returns its directory."""
        state = StepState(
            step=self.step, weight_version=self.weight_version, reference_step=self._reference_step
        )
        reference = None if self._reference is None else self._reference.export_weights()
        return self._checkpoints.save(
            state, self._model.export_weights(), self._optimizer.state_dict(), reference
        )

    def export_weights(self) -> dict[str, torch.Tensor]:
        """A copy of the current weights by canonical name."""
        return self._model.export_weights()

    def close(self) -> None:
        """Waits for the upload under way and ends its thread."""
        self._uploads.close()

    def _restore(self) -> None:
        loaded = self._checkpoints.load_newest()
        if loaded is None:
            return
        self.step = loaded.state.step
        self._model.import_weights(loaded.weights)
        self._optimizer.load_state_dict(loaded.optimizer_state)
        self._reference_step = loaded.state.reference_step
        if self._reference is not None and loaded.reference_weights is not None:
            self._reference.import_weights(loaded.reference_weights)

    def _refresh_reference(self) -> None:
        every = self.config.objective.kl_refresh_steps
        if self._reference is not None and every is not None and self.step % every == 0:
            self._reference.import_weights(self._model.export_weights())
            self._reference_step = self.step

    def _set_learning_rates(self) -> None:
        rates = self.config.optimizer
        scale = warmup_scale(self.step, rates.warmup_steps)
        set_learning_rates(
            self._optimizer, muon=scale * rates.muon_learning_rate, adam=scale * rates.learning_rate
        )


def warmup_scale(steps_taken: int, warmup_steps: int) -> float:
    """Share of the learning rate for the next step: (steps taken + 1) / warm-up, at most 1."""
    return 1.0 if warmup_steps == 0 else min(1.0, (steps_taken + 1) / warmup_steps)


def _optimizer_config(config: PolicyOptimizerConfig) -> OptimizerConfig:
    return OptimizerConfig(
        kind=config.kind,
        muon_learning_rate=config.muon_learning_rate,
        adam_learning_rate=config.learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=config.weight_decay,
    )
