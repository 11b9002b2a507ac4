"""Settings, requests and results of the MTP stage, free of torch so that recipes can hold them."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from ostinato.infra.platform.record import Record
from ostinato.models.decode.config import DecodingConfig
from ostinato.models.training.config import PLACEMENT, LoopConfig, PhaseResult


class MtpConfig(LoopConfig):
    """Settings of MTP distillation."""

    depth: NonNegativeInt = Field(
        default=2,
        description="draft layers; those that the checkpoint lacks are freshly drawn; 0: the stage is skipped",
    )
    hidden_size: PositiveInt = Field(default=256, description="inner width of a draft layer")
    after_phase: str | None = Field(
        default=None,
        description="phase of pretraining after which draft layers are distilled; in later phases they learn with "
        "the trunk, like Composer 2's. None: after the last phase, with a frozen trunk",
    )
    draft_weight: NonNegativeFloat = Field(
        default=0.3,
        description="weight of the draft loss in the trunk's gradient when both learn; 0: it does not reach the trunk",
    )
    evaluation_tokens: PositiveInt = Field(
        default=8_192, description="tokens of each held-out shard"
    )
    evaluation_row_tokens: int = Field(
        default=256, ge=8, description="row length for evaluating held-out shards"
    )


class MtpRequest(Record):
    """One run of the stage."""

    config: MtpConfig
    corpus_directory: str = Field(description="tokenizer.json, shards/, demonstrations.safetensors")
    checkpoint_directory: str = Field(description="model that gets draft layers")

    def placement(self) -> dict[str, set[str]]:
        """Fields of where it runs, not of what it computes."""
        return {"config": PLACEMENT}


class DraftQuality(Record):
    """Agreement of draft layers with the main head on held-out shards. Lists are by depth."""

    step: int = Field(description="steps before the measurement")
    kl_nats: tuple[float, ...] = Field(
        description="KL(main || draft) per token over all held-out shards"
    )
    agreement: tuple[float, ...] = Field(
        description="share of tokens with the same likeliest token by main head and draft"
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

    prompts: PositiveInt = Field(default=48, description="answers decoded in each way")
    depth: PositiveInt = Field(default=2, description="maximum draft tokens per step")
    lookup_tokens: NonNegativeInt = Field(
        default=7, description="maximum lookup drafts per step, for the third way"
    )
    max_new_tokens: PositiveInt = Field(default=48, description="maximum tokens of one answer")


class SpeculationRequest(Record):
    """A checkpoint, and the corpus with the transcripts whose prompts it answers."""

    config: SpeculationConfig
    decoding: DecodingConfig = Field(
        default=DecodingConfig(), description="measured engine; its draft settings are ignored"
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
    speed_up: float = Field(description="rate with draft layers in every step over the plain rate")
    lookup_speed_up: float = Field(
        description="rate with layers and lookup by the policy over the plain rate"
    )
    answers: int
