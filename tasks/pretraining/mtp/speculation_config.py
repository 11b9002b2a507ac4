"""What the speculation measurement is asked and what it answers. Torch-free: flows compose them."""

from pydantic import Field, NonNegativeInt, PositiveInt

from ostinato.infra.platform.record import Record
from ostinato.models.decode.config import DecodingConfig


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
