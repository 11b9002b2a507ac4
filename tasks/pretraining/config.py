"""Settings, request and result of the pretraining stage."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.training.config import (
    DEMONSTRATIONS,
    PLACEMENT,
    RECOMPUTE,
    TRANSCRIPT_ROW_MULTIPLE,
    LayoutConfig,
    LoopConfig,
    LoraConfig,
    PhaseResult,
)


class PretrainingLayout(LayoutConfig):
    """Degrees of parallelism over the ranks. The remaining ranks are data-parallel."""

    pipeline: int = Field(default=1, ge=1, description="stages, each with some of the layers")
    interleave: int = Field(
        default=1, ge=1, description="chunks of layers per stage; more chunks shorten its waits"
    )
    context: int = Field(default=1, ge=1, description="ranks that share each row, in all layers")
    expert_tensor: int = Field(
        default=1, ge=1, description="ranks that share each expert, split along its inner width"
    )


class PretrainingConfig(LoopConfig):
    """Settings of pretraining."""

    layout: PretrainingLayout = PretrainingLayout()
    transformer_engine: Literal["bf16", "delayed", "tensorwise", "blockwise", "mxfp8"] | None = (
        Field(
            default=None,
            description="NVIDIA's Transformer Engine for attention and dense layers, on CUDA: bf16 or the name "
            "of its FP8 recipe. Experts keep their precision. None: Megatron's own layers",
        )
    )
    recompute: bool = Field(default=False, description=RECOMPUTE)
    lora: LoraConfig | None = Field(
        default=None,
        description="train only adapters of attention, dense MLPs and shared experts, with AdamW; "
        "None: all parameters",
    )
    codebase_sources: tuple[str, ...] = Field(
        default=("code", "library"),
        min_length=1,
        description="held-out shards of the codebase perplexity",
    )
    evaluation_tokens: PositiveInt = Field(
        default=16_384, description="tokens of each held-out shard"
    )
    evaluation_row_tokens: int = Field(
        default=256, ge=8, description="row length for evaluating held-out shards"
    )

    @property
    def parallel_layout(self) -> ParallelLayout:
        """The layout of the ranks."""
        return self.layout.over(self.world_size)

    def cut_after(self, name: str) -> tuple[Self, Self]:
        """Settings of the phases up to this one and of the phases after it, which read the same
        rows as in one run. Raises ValueError if draft layers cannot learn in the latter.
        """
        names = [phase.name for phase in self.phases]
        if name not in names[:-1]:
            raise ValueError(
                f"mtp.after_phase is {name!r}, wanted a phase before the last, one of {names[:-1]}"
            )
        if self.parallel_layout.is_cut or self.lora is not None:
            layout = self.layout.model_dump(exclude_defaults=True)
            raise ValueError(
                f"mtp.after_phase is {name!r} with pretraining.layout {layout} and pretraining.lora {self.lora}, "
                "wanted neither: draft layers learn only with a trunk that is not split and fully trained"
            )
        count = names.index(name) + 1
        later = {"phases": self.phases[count:], "seed": self.seed + count}
        return (
            self.model_copy(update={"phases": self.phases[:count]}),
            self.model_copy(update=later),
        )

    @model_validator(mode="after")
    def _check_adapters_and_recompute(self) -> Self:
        if self.lora is not None and self.layout != PretrainingLayout():
            raise ValueError(
                f"lora with layout {self.layout.model_dump(exclude_defaults=True)}, wanted none: "
                "adapters are not split over ranks"
            )
        if self.lora is not None and self.transformer_engine is not None:
            raise ValueError(
                f"lora with transformer_engine={self.transformer_engine!r}, wanted none: adapters need "
                "Megatron's own layers"
            )
        if self.recompute and self.transformer_engine is not None:
            raise ValueError(
                f"recompute with transformer_engine={self.transformer_engine!r}, wanted None: its layers keep "
                "state between forward and backward"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        layout = self.parallel_layout
        for phase in self.phases:
            number = phase.microbatches_per_step // layout.data
            if layout.interleave > 1 and number % layout.pipeline:
                raise ValueError(
                    f"phase {phase.name!r}: {number} microbatches per step and data-parallel rank, wanted "
                    f"a multiple of layout.pipeline={layout.pipeline} with layout.interleave="
                    f"{layout.interleave}"
                )
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        lengths = {"evaluation_row_tokens": self.evaluation_row_tokens}
        for phase in self.phases:
            lengths |= {
                f"sequence_tokens of phase {phase.name!r}": phase.sequence_tokens,
                f"microbatch_tokens of phase {phase.name!r}": phase.microbatch_tokens,
            }
            if DEMONSTRATIONS in phase.blend:
                lengths["transcripts, whose rows are multiples of"] = TRANSCRIPT_ROW_MULTIPLE
        tensor, context = self.layout.tensor, self.layout.context
        pieces = tensor * (2 * context if context > 1 else 1)
        share = f"layout.tensor={tensor}" + (
            f" x 2 x layout.context={context}" if context > 1 else ""
        )
        for name, tokens in lengths.items():
            if tokens % pieces:
                raise ValueError(
                    f"{share} does not divide {name}={tokens}: tensor-parallel ranks share each row, and "
                    "context-parallel ranks take two pieces of it each"
                )
        return self


class PretrainingRequest(Record):
    """One run of the stage."""

    config: PretrainingConfig
    corpus_directory: str = Field(description="tokenizer.json, shards/, demonstrations.safetensors")
    checkpoint_directory: str | None = Field(
        default=None, description="directory of the checkpoint to start from; None: fresh weights"
    )
    spec: ModelSpec | None = Field(
        default=None, description="shape of fresh weights; None with a checkpoint"
    )
    draft_weight: NonNegativeFloat | None = Field(
        default=None,
        description="weight of the draft loss in the trunk's gradient; 0: only draft layers learn from it; None: not "
        "even these",
    )

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if (self.checkpoint_directory is None) == (self.spec is None):
            raise ValueError("wanted exactly one of checkpoint_directory and spec")
        if self.config.lora is not None and self.checkpoint_directory is None:
            raise ValueError(
                "pretraining.lora without a base checkpoint, wanted base_checkpoint: adapters need "
                "weights that are trained already"
            )
        return self

    def placement(self) -> dict[str, set[str]]:
        """Fields of where it runs, not of what it computes."""
        return {"config": PLACEMENT}


class Perplexity(Record):
    """Perplexity of held-out shards after some step."""

    step: int = Field(description="steps of the whole stage before the measurement")
    perplexity: float = Field(description="over the tokens of codebase_sources together")
    bits_per_byte: float | None = Field(
        default=None, description="loss of the same tokens per byte; None: an older result"
    )
    by_source: dict[str, float]


class PretrainingResult(Record):
    """Checkpoint and measurements of pretraining."""

    checkpoint_directory: str
    num_parameters: int
    before: Perplexity
    after: Perplexity
    evaluations: tuple[Perplexity, ...] = Field(description="before, in between, after")
    phases: tuple[PhaseResult, ...]
    transcripts_too_long: int = Field(description="transcripts left out as too long for any bucket")
    times_resumed: int

    def followed_by(self, later: Self) -> Self:
        """The result of both runs as one. `later` began where this run ended."""
        steps = self.after.step
        evaluations = [
            one.model_copy(update={"step": steps + one.step}) for one in later.evaluations[1:]
        ]
        changes = {
            "before": self.before,
            "after": evaluations[-1],
            "evaluations": (*self.evaluations, *evaluations),
            "phases": self.phases + later.phases,
            "times_resumed": self.times_resumed + later.times_resumed,
        }
        return later.model_copy(update=changes)
