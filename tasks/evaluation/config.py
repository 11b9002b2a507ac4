"""Settings of evaluation, of the controls of RL and of the gate."""

from collections.abc import Collection

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record, Share
from ostinato.tasks.records import AttemptMeans


class EvaluationConfig(Record):
    """One run of a checkpoint over a suite."""

    problems: PositiveInt = Field(default=100, description="problems of the suite, drawn by seed")
    attempts_per_problem: PositiveInt = Field(default=4, description="independent attempts")
    temperature: NonNegativeFloat = Field(default=1.0, description="0 is greedy")
    seed: int = Field(default=0, description="seed of the drawn problems and of the attempts")
    confidence: float = Field(
        default=0.90, gt=0.5, lt=1, description="confidence of every interval"
    )


class Prices(Record):
    """Prices of a model's tokens, for the cost of an attempt in reports."""

    input_usd_per_million_tokens: NonNegativeFloat = Field(
        description="price of prompts and tool results, each token counted once, as with a prompt cache"
    )
    output_usd_per_million_tokens: NonNegativeFloat = Field(description="price of generated tokens")

    def cost_usd(self, means: AttemptMeans) -> float | None:
        """Mean cost of an attempt. None if prompt tokens were not counted."""
        if means.prompt_tokens is None:
            return None
        paid, earned = self.input_usd_per_million_tokens, self.output_usd_per_million_tokens
        return (means.prompt_tokens * paid + means.generated_tokens * earned) / 1e6


class ControlsConfig(Record):
    """Further controls of RL, besides restarts and best of n, for `ostinato run controls`."""

    fine_tuning_tokens: NonNegativeInt = Field(
        default=0,
        description="tokens of further fine-tuning of RL's start, with the last phase of pretraining on newly "
        "drawn demonstrations; its checkpoint is one more control. As many as RL's time allows; 0: none",
    )


class GateConfig(Record):
    """Requirements on a candidate before users get it."""

    margin: Share = Field(
        default=0.05,
        description="largest loss of average solve rate that still counts as not worse. An equal "
        "candidate passes only if the interval's half-width is smaller: 100 problems x 4 attempts give "
        "about +-4.5 points",
    )
    champions: int = Field(
        default=20,
        ge=1,
        description="newest champions of the line that are measured on the same problems; the margin "
        "also applies to the best of them, so that small losses do not add up",
    )
    slice_margins: dict[str, Share] = Field(
        default={},
        description="margins of slices of a suite, by name, in addition to that of all problems; needs an "
        "evaluation on a suite with these slices",
    )
    confidence: float = Field(
        default=0.90,
        gt=0.5,
        lt=1,
        description="two-sided confidence of the paired interval; its lower bound is compared",
    )
    minimum_problems: int = Field(default=10, ge=2, description="minimum number of shared problems")
    floor: Share = Field(
        default=0.05,
        description="lower bound of the average solve rate that a first checkpoint needs",
    )
    broken_call_ratio_increase: NonNegativeFloat = Field(
        default=0.10, description="largest rise of the share of broken tool calls, 0..1"
    )
    generated_tokens_growth: float = Field(
        default=2.0, ge=1, description="largest factor on mean generated tokens per attempt"
    )
    resamples: int = Field(default=4_000, ge=200, description="bootstrap and permutation draws")
    seed: int = Field(default=0, description="seed of these draws")

    def refuse_slices(self, suite: str, known: Collection[str]) -> None:
        """ConfigError if `slice_margins` names a slice that the suite lacks. `known`: slices of the suite."""
        unknown = sorted(self.slice_margins.keys() - set(known))
        if unknown:
            raise ConfigError(
                f"gate.slice_margins names {', '.join(unknown)}, and {suite} has the slices "
                f"{', '.join(known) or 'none'}; evaluate on a suite with that slice (--suite), or remove its margin"
            )
