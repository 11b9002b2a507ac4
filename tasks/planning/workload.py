"""Work of one optimiser step: tokens, rows, microbatches."""

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout


class TrainingWork(Record):
    """One optimiser step of the trainer."""

    row_tokens: int = Field(gt=0, description="length of a row, which context parallelism divides")
    attended_tokens: float = Field(gt=0, description="mean length of the sequences in rows")
    microbatch_tokens: int = Field(gt=0, description="tokens of one data-parallel rank's pass")
    step_tokens: float = Field(gt=0, description="over all ranks")
    fp8: bool = False
    recompute: bool = Field(default=False, description="each layer runs forward again")
    forward_passes: int = Field(default=0, ge=0)
    """passes for log-probs before the step: policy, reference"""

    def microbatches(self, layout: ParallelLayout) -> float:
        """Of one data-parallel rank."""
        return max(1.0, self.step_tokens / layout.data / self.microbatch_tokens)


class RolloutWork(Record):
    """Attempts of one optimiser step."""

    attempts: int = Field(gt=0)
    prompt_tokens: float = Field(ge=0, description="mean of an attempt, tool results included")
    generated_tokens: float = Field(gt=0, description="mean of an attempt")
    longest_generated_tokens: float = Field(gt=0)
    tool_seconds: float = Field(ge=0, description="seconds of an attempt's tools, in its sandbox")

    @property
    def context_tokens(self) -> float:
        """Mean length of an attempt at its end."""
        return self.prompt_tokens + self.generated_tokens
