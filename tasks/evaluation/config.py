"""Settings of evaluation, of the controls of RL and of the gate."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from ostinato.infra.platform.record import Record, Share


class EvaluationConfig(Record):
    """One run of a checkpoint over a suite."""

    problems: PositiveInt = Field(default=100, description="problems of the suite, drawn by seed")
    attempts_per_problem: PositiveInt = Field(default=4, description="independent attempts")
    temperature: NonNegativeFloat = Field(default=1.0, description="0 is greedy")
    seed: int = Field(default=0, description="seed of the drawn problems and of the attempts")
    confidence: float = Field(
        default=0.90, gt=0.5, lt=1, description="confidence of every interval"
    )


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
