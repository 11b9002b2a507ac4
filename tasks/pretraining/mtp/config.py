"""What the MTP stage is asked and what it answers.

Torch-free: the recipe composes them.
"""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from ostinato.infra.platform.record import Record
from ostinato.models.decode.config import DecodingConfig
from ostinato.models.training.config import PLACEMENT, LoopConfig, PhaseResult


class MtpConfig(LoopConfig):
    """Settings of MTP distillation."""

    depth: NonNegativeInt = Field(
        default=2,
        description="draft layers; more than the checkpoint has are drawn anew; 0: the stage is left out",
    )
    hidden_size: PositiveInt = Field(default=256, description="inner width of a draft layer")
    after_phase: str | None = Field(
        default=None,
        description="phase of pretraining after which draft layers are distilled; through the later ones they learn "
        "with the trunk, as Composer 2's did. None: after the last, and the trunk stays as it is",
    )
    draft_weight: NonNegativeFloat = Field(
        default=0.3,
        description="weight of the draft loss in the trunk's gradient where both learn; 0: none of it reaches the trunk",
    )
    evaluation_tokens: PositiveInt = Field(
        default=8_192, description="tokens of each held-out shard"
    )
    evaluation_row_tokens: int = Field(
        default=256, ge=8, description="row length in which held-out shards are evaluated"
    )


class MtpRequest(Record):
    """One run of the stage."""

    config: MtpConfig
    corpus_directory: str = Field(description="tokenizer.json, shards/, demonstrations.safetensors")
    checkpoint_directory: str = Field(description="the model to give draft layers to")

    def placement(self) -> dict[str, set[str]]:
        """Fields that say where it runs, not what it computes."""
        return {"config": PLACEMENT}


class DraftQuality(Record):
    """Agreement of draft layers with the main head on held-out shards. Lists are by depth."""

    step: int = Field(description="steps taken before")
    kl_nats: tuple[float, ...] = Field(description="KL(main || draft) a token, all held-out shards")
    agreement: tuple[float, ...] = Field(
        description="share of tokens where the main head's likeliest token is the draft's too"
    )
    agreement_by_source: dict[str, tuple[float, ...]]


class MtpResult(Record):
    """Checkpoint and measurements of the MTP stage."""

    checkpoint_directory: str
    before: DraftQuality
    after: DraftQuality
    evaluations: tuple[DraftQuality, ...] = Field(description="before, in between, after")
    phases: tuple[PhaseResult, ...]
    times_resumed: int


class SpeculationConfig(Record):
    """Size of a speculation measurement."""

    prompts: PositiveInt = Field(default=48, description="answers decoded each way")
    depth: PositiveInt = Field(default=2, description="draft tokens a step, at most")
    lookup_tokens: NonNegativeInt = Field(
        default=7, description="drafts a step from the lookup, at most, the third way"
    )
    max_new_tokens: PositiveInt = Field(default=48, description="tokens of one answer, at most")


class SpeculationRequest(Record):
    """A checkpoint and the transcripts whose prompts it decodes."""

    config: SpeculationConfig
    decoding: DecodingConfig = Field(
        default=DecodingConfig(), description="the engine that is measured; its drafts are ignored"
    )
    checkpoint_directory: str
    corpus_directory: str


class SpeculationResult(Record):
    """Greedy decoding at batch 1, plain and drafted."""

    acceptance: float = Field(description="accepted share of all draft tokens, 0..1")
    acceptance_by_depth: tuple[float, ...]
    tokens_per_forward: float
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    speed_up: float = Field(description="draft layers in every step over plain, both of this run")
    lookup_speed_up: float = Field(
        description="layers and lookup as the policy chooses, over plain"
    )
    answers: int
