"""Settings of a training loop, free of tensors so that recipes can hold them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ostinato.models.layout import ParallelLayout
from ostinato.models.record import Record
from ostinato.models.training.optimizer_config import OptimizerConfig

DEMONSTRATIONS = "demonstrations"
# Settings of where a run is computed, not of what: a run resumes after they change.
PLACEMENT = {"world_size", "layout", "recompute"}
TRANSCRIPT_ROW_MULTIPLE = 64  # row lengths of transcripts are multiples of it


class PhaseConfig(Record):
    """Phase of training with one row length and one learning-rate schedule."""

    name: str = Field(min_length=1, description="shown in progress and reports")
    blend: dict[str, tuple[float, float]] = Field(min_length=1)
    """source -> its share of tokens at the start and at the end of the phase, changing linearly;
    shares are relative. A source is a shard SOURCE_train of the corpus, or 'demonstrations'
    (transcripts, loss on their mask)"""
    tokens: int = Field(gt=0)
    """tokens computed, padding included; rounded down to whole steps"""
    sequence_tokens: int = Field(default=256, ge=8, description="row length of shard sources")
    microbatch_tokens: int = Field(default=3072, gt=0)
    """tokens of one forward and backward pass, padding included"""
    global_batch_tokens: int = Field(default=3072, gt=0)
    """tokens of one step over all ranks, padding included"""
    muon_learning_rate: float = Field(default=0.02, gt=0, description="peak learning rate of Muon")
    adam_learning_rate: float = Field(default=4e-3, gt=0, description="peak learning rate of AdamW")
    warmup_steps: int = Field(default=0, ge=0)
    """steps over which the rates rise linearly"""
    decay_ratio: float = Field(default=0.3, ge=0, le=1)
    """last part of the phase, in which the rates fall to 0"""
    rope_scaling_factor: float | None = Field(default=None, ge=1)
    """divisor of positions from this phase on; None: as before"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.microbatch_tokens % self.sequence_tokens:
            raise ValueError(
                f"phase {self.name!r}: sequence_tokens={self.sequence_tokens} must divide "
                f"microbatch_tokens={self.microbatch_tokens}"
            )
        if self.global_batch_tokens % self.microbatch_tokens:
            raise ValueError(
                f"phase {self.name!r}: microbatch_tokens={self.microbatch_tokens} must divide "
                f"global_batch_tokens={self.global_batch_tokens}"
            )
        if DEMONSTRATIONS in self.blend and self.microbatch_tokens < TRANSCRIPT_ROW_MULTIPLE:
            raise ValueError(
                f"phase {self.name!r}: microbatch_tokens={self.microbatch_tokens}, wanted at least "
                f"{TRANSCRIPT_ROW_MULTIPLE} with {DEMONSTRATIONS!r} in the blend: no transcript would fit"
            )
        if self.num_steps == 0:
            raise ValueError(
                f"phase {self.name!r}: tokens={self.tokens}, wanted at least "
                f"global_batch_tokens={self.global_batch_tokens}"
            )
        for source, shares in self.blend.items():
            if min(shares) < 0:
                raise ValueError(
                    f"phase {self.name!r}: share of {source!r} is {shares}, wanted >= 0"
                )
        for place, when in enumerate(("start", "end")):
            if sum(shares[place] for shares in self.blend.values()) <= 0:
                raise ValueError(f"phase {self.name!r}: shares at its {when} sum to 0, wanted more")
        return self

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the phase."""
        return self.tokens // self.global_batch_tokens

    @property
    def microbatches_per_step(self) -> int:
        """Forward and backward passes of a step, over all ranks."""
        return self.global_batch_tokens // self.microbatch_tokens

    def learning_rate_scale(self, step: int) -> float:
        """Factor on the peak rates at `step` (from 0): linear up, constant, linear down."""
        decay_steps = self.decay_ratio * self.num_steps
        rise = (step + 1) / (self.warmup_steps + 1) if step < self.warmup_steps else 1.0
        fall = (self.num_steps - step) / (decay_steps + 1) if decay_steps else 1.0
        return min(1.0, rise, fall)


class LayoutConfig(Record):
    """Degrees of parallelism over the ranks. The remaining ranks are data-parallel."""

    tensor: int = Field(default=1, ge=1)
    """ranks that share each matrix, the vocabulary and each row"""
    expert: int = Field(default=1, ge=1, description="ranks that share the experts of a layer")

    def over(self, world_size: int) -> ParallelLayout:
        """The layout of `world_size` ranks. Raises ValueError if the degrees do not divide it."""
        return ParallelLayout.over(world_size, **self.model_dump())


RECOMPUTE = (
    "keep only each layer's input between forward and backward, and run its forward again: less memory for a "
    "third more arithmetic, with the same numbers"
)


# As in kernels/moe/precision.py, which is not imported here: configurations are read without torch.
TrainingPrecision = Literal["fp32", "bf16", "mx32", "mx128"]


class LoraConfig(Record):
    """Low-rank adapters in place of full-parameter training (LoRA, arXiv 2106.09685)."""

    rank: int = Field(default=8, ge=1, description="inner width of each adapter")
    alpha: float = Field(
        default=16.0, gt=0, description="numerator of the scale of updates, alpha / rank"
    )


class LoopConfig(Record):
    """Settings shared by every step and rank."""

    phases: tuple[PhaseConfig, ...] = ()
    """phases of training, one after another; none: the checkpoint stays as it is"""
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: TrainingPrecision = "fp32"
    """number format of the experts' products; mx32 and mx128 are MXFP8 in blocks of 32 and 128.
    Except with fp32, a GPU computes the other products in bf16 (a CPU in fp32); weights, router and
    optimiser are always fp32"""
    balance_rate: float = Field(default=0.002, ge=0)
    """step of the experts' balancing bias"""
    evaluate_every_steps: int | None = Field(default=None, gt=0)
    """steps between evaluations; None: only before and at the end of each phase"""
    checkpoint_every_seconds: float = Field(default=20.0, ge=0)
    """time between resume points; 0: after every step. Each phase also ends with one"""
    world_size: int = Field(default=1, ge=1)
    """processes; each computes its part of every step"""
    seed: int = 0
    """seed of fresh weights and of the data order; default: the recipe's seed"""

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError(f"phases are called {names}, wanted different names")
        for phase in self.phases:
            if phase.microbatches_per_step % self.parallel_layout.data:
                raise ValueError(
                    f"phase {phase.name!r}: {phase.microbatches_per_step} microbatches per step, "
                    f"wanted a multiple of {self.parallel_layout.data} data-parallel ranks"
                )
        return self

    @property
    def parallel_layout(self) -> ParallelLayout:
        """The layout of the ranks: only data parallelism."""
        return ParallelLayout(data=self.world_size)


class PhaseResult(Record):
    """Result of one phase."""

    name: str
    steps: int
    tokens: int = Field(description="tokens computed, padding included")
    target_tokens: int = Field(description="tokens with loss")
    final_loss: float = Field(description="nats per target token, mean over the last tenth")
    seconds: float = Field(
        description="seconds inside steps, without evaluations and resume points"
    )
    tokens_per_second: float
