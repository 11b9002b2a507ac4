"""How a run's engines compute, as a recipe says it.

Plain values; torch is never imported, since flows compose it. What it becomes is
`ostinato.infra.serving.engine.local.configure_engine`.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DecodingConfig(BaseModel):
    """How the decode engine computes: alike in rollouts, in evaluation and before users."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    native: bool = Field(
        default=False,
        description="decode steps as loops that numba compiles, in fp32 on a CPU; off: eager torch",
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of weights and caches; sums, norms and softmax are fp32"
    )
    lookup_tokens: int = Field(
        default=0,
        ge=0,
        description="draft tokens a step, at most, copied from what followed the same tokens before, "
        "in the context or in earlier answers; where it pays, and no sample changes; 0: none",
    )
    lookup_entries: int = Field(
        default=65_536,
        ge=0,
        description="places of earlier answers remembered for that, a power of two; 0: none, as "
        "always before users, of whom none should learn from an answer's speed what others were told",
    )

    @model_validator(mode="after")
    def _check_entries(self) -> Self:
        if self.lookup_entries & (self.lookup_entries - 1):
            raise ValueError(
                f"lookup_entries is {self.lookup_entries}, wanted 0 or a power of two such as 65536"
            )
        return self

    @model_validator(mode="after")
    def _check_native(self) -> Self:
        if self.native and self.precision != "fp32":
            raise ValueError(
                f"native is true with precision {self.precision!r}, "
                "wanted native = false there: the compiled loops run on a CPU in fp32"
            )
        return self
