"""The training loop shared by all stages that train on a corpus.

An interrupted run continues from its resume point, in any layout, and ends with the same weights.
All ranks run the same steps; each takes the microbatches of its data-parallel index.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from ostinato.models.checkpoint.resume import ResumePoints, load_parts
from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.batch import PhaseData
from ostinato.models.training.config import LoopConfig, PhaseConfig, PhaseResult
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.optimizer import (
    allocate_state,
    build_optimizer,
    set_learning_rates,
    sharded_state,
)
from ostinato.models.training.schedule import Loss, run_microbatches

# (phase, steps done) -> figures as JSON
Evaluate = Callable[[int], dict[str, Any]]  # of the number of steps done
# (steps done, steps of the run, phase, metrics by name)
OnStep = Callable[..., None]


@dataclass
class RunState:
    """Progress of a run, which a resume point stores with the tensors."""

    phase: int = 0
    step: int = 0
    seconds: float = 0.0
    target_tokens: int = 0
    losses: list[float] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    times_resumed: int = 0
    transcripts_too_long: int = 0  # left out by the latest phase with transcripts


@dataclass(frozen=True)
class Work:
    """Model, loss, data and evaluation of a run. Only parameters that require a gradient change."""

    model: TrainerModel
    loss: Loss
    evaluate: Evaluate
    config: LoopConfig
    corpus_directory: Path


class TrainingRun:
    """One run over all phases. Resume points of another `identity` are ignored."""

    def __init__(self, work: Work, directory: Path, identity: str, on_step: OnStep) -> None:
        self.work = work
        self.model, self.config = work.model, work.config
        self.points = ResumePoints(directory)
        self.identity = identity
        self.on_step = on_step
        self.state = RunState()
        self.optimizer = build_optimizer(self.model, self.config.optimizer)
        self.gradients = LayoutGradients(self.model)
        self.total_steps = sum(phase.num_steps for phase in self.config.phases)
        self.saved_at = time.monotonic()

    @property
    def steps_done(self) -> int:
        """Steps done in all phases together."""
        earlier = self.config.phases[: self.state.phase]
        return sum(phase.num_steps for phase in earlier) + self.state.step

    def run(self) -> RunState:
        """Runs the remaining phases."""
        self._restore()
        with self.points:
            if not self.state.evaluations:
                self._evaluate()
            while self.state.phase < len(self.config.phases):
                phase = self.config.phases[self.state.phase]
                if phase.rope_scaling_factor is not None:
                    self.model.set_rope_scaling(phase.rope_scaling_factor)
                self._run_phase(phase)
        return self.state

    def _run_phase(self, phase: PhaseConfig) -> None:
        data = PhaseData(
            phase, self.work.corpus_directory, seed=self.config.seed + self.state.phase
        )
        if data.transcripts is not None:
            self.state.transcripts_too_long = data.transcripts.num_too_long
        every = self.config.evaluate_every_steps
        while self.state.step < phase.num_steps:
            started_at = time.monotonic()
            metrics = self._take_step(phase, data)
            seconds = time.monotonic() - started_at
            metrics["tokens_per_second"] = phase.global_batch_tokens / seconds
            self.state.step += 1
            self.state.seconds += seconds
            done = self.steps_done
            if self.state.step == phase.num_steps or (every is not None and done % every == 0):
                self._evaluate()
            if dist.get_rank() == 0:
                latest = self.state.evaluations[-1]
                metrics |= {name: item for name, item in latest.items() if isinstance(item, float)}
                self.on_step(done, self.total_steps, phase.name, **metrics)
            if self.state.step < phase.num_steps and self._is_save_due():
                self._save()
        self._close_phase(phase)

    def _take_step(self, phase: PhaseConfig, data: PhaseData) -> dict[str, float]:
        """Takes one optimiser step and returns its metrics."""
        scale = phase.learning_rate_scale(self.state.step)
        muon, adam = scale * phase.muon_learning_rate, scale * phase.adam_learning_rate
        set_learning_rates(self.optimizer, muon=muon, adam=adam)
        self.gradients.clear()
        first, per_step = self.state.step * phase.microbatches_per_step, phase.microbatches_per_step
        rank = parallel_state.get_data_parallel_rank()
        ranks = parallel_state.get_data_parallel_world_size()
        batches = [
            data.microbatch(index).to(current_device())
            for index in range(first + rank, first + per_step, ranks)
        ]
        sums = run_microbatches(self.model, batches, self.work.loss)
        dist.all_reduce(
            sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        loss_sum, target_tokens = sums.tolist()
        counts_LE = self.model.routers.counts_LE().clone()
        if counts_LE.numel():  # each rank counts the tokens of its rows, or of its part of each
            dist.all_reduce(
                counts_LE,
                group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            )
        self.gradients.reduce()
        self.gradients.scale(1 / max(1.0, target_tokens))
        norm = self.gradients.clip(self.config.optimizer.gradient_clip_norm)
        if not norm < float("inf"):
            raise ValueError(
                f"gradient norm is {norm} at step {self.state.step + 1} of phase {phase.name!r}, wanted a finite "
                "one; the weights were not changed and the last resume point is kept; lower the phase's learning rates"
            )
        self.optimizer.step()
        self.model.routers.balance(counts_LE, self.config.balance_rate * scale)
        loss_mean = loss_sum / max(1.0, target_tokens)
        self.state.target_tokens += int(target_tokens)
        self.state.losses.append(loss_mean)
        return {"loss": loss_mean, "gradient_norm": norm, "learning_rate_scale": scale}

    def _close_phase(self, phase: PhaseConfig) -> None:
        tail = self.state.losses[-max(1, phase.num_steps // 10) :]
        tokens = phase.num_steps * phase.global_batch_tokens
        result = PhaseResult(
            name=phase.name,
            steps=phase.num_steps,
            tokens=tokens,
            target_tokens=self.state.target_tokens,
            final_loss=sum(tail) / len(tail),
            seconds=self.state.seconds,
            tokens_per_second=tokens / self.state.seconds,
        )
        self.state.phases.append(result.model_dump())
        self.state.phase += 1
        self.state.step, self.state.seconds, self.state.target_tokens, self.state.losses = (
            0,
            0.0,
            0,
            [],
        )
        self._save()

    def _evaluate(self) -> None:
        self.model.eval()
        self.state.evaluations.append(self.work.evaluate(self.steps_done))
        self.model.train()

    def _is_save_due(self) -> bool:
        """Whether the interval is over on any rank. All ranks agree although their clocks differ."""
        seconds = torch.tensor(time.monotonic() - self.saved_at, device=current_device())
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item() > self.config.checkpoint_every_seconds

    def _save(self) -> None:
        """Begins to write a resume point."""
        self.saved_at = time.monotonic()
        common = {
            "identity": self.identity,
            "rope_scaling_factor": self.model.spec.rope_scaling_factor,
            "state": asdict(self.state),
        }
        name = f"{self.state.phase:03}-{self.state.step:08}"
        self.points.save(name, self._parts(), common)

    def _restore(self) -> None:
        found = self.points.newest(self.identity)
        if found is None:
            return
        point, common = found
        self.state = RunState(**common["state"])
        self.state.times_resumed += 1
        self.model.set_rope_scaling(common["rope_scaling_factor"])
        allocate_state(self.optimizer, self.gradients)
        load_parts(point, self._parts())

    def _parts(self) -> list[ShardedTensor]:
        """This rank's parts of the weights and of the optimiser's state."""
        return sharded_state(self.model, self.optimizer, self.model.moving_tensors())
