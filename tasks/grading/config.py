"""Settings of grading: the weight of each reward term and the shape of the length penalty.

Owns GradingConfig. Torch-free: the recipe composes it.
"""

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Frozen settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EffortWeights(Config):
    """How much one unit of each kind of effort counts in x of the length penalty."""

    thinking_tokens: float = Field(default=1.0, ge=0)
    call_tokens: float = Field(
        default=1.0, ge=0, description="sampled tokens of turns with tool calls"
    )
    output_tokens: float = Field(
        default=0.1, ge=0, description="tokens of tool results, which the model only reads"
    )
    final_tokens: float = Field(
        default=1.0, ge=0, description="sampled tokens of the closing message"
    )
    tool_calls: float = Field(default=2.0, ge=0)
    turns: float = Field(default=4.0, ge=0)


class GradingConfig(Config):
    """The reward is the sum of its terms; a weight of 0 switches a term off."""

    correctness: float = Field(default=1.0, ge=0, description="for a passed verdict")
    length: float = Field(default=0.0005, ge=0, description="taken off, times C_{k,q}(x)")
    length_k: float = Field(
        default=1.0 / 60.0, gt=0, description="curvature: larger bends earlier, in 1/x"
    )
    length_q: float = Field(
        default=0.5, ge=0, description="0: linear, 1: logarithmic, above 1: bounded"
    )
    effort: EffortWeights = EffortWeights()
    broken_call: float = Field(
        default=0.02, ge=0, description="taken off for each malformed, unknown or invalid call"
    )
    most_broken_calls: int = Field(default=5, ge=0, description="further ones cost nothing more")
    no_edit: float = Field(
        default=0.05, ge=0, description="taken off when the repository ends as it began"
    )
    unverified: float = Field(
        default=0.0, ge=0, description="taken off when the last edit was not tested"
    )
    time_limit_seconds: float = Field(
        default=20.0, gt=0, description="wall time of the verdict's test run"
    )
