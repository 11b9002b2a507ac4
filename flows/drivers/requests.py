"""What the drivers are asked and what they answer, for stages that join several others.

Torch-free: flows compose them.
"""

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.agent.config import HarnessConfig
from ostinato.models.decode.config import DecodingConfig
from ostinato.tasks.evaluation.run import EvaluationRequest
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.learning.config import LearningConfig
from ostinato.tasks.records import Split
from ostinato.tasks.rollout.config import RolloutConfig


class Frozen(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReinforcementRequest(Frozen):
    """One RL run."""

    run_id: str = Field(
        description="names the run in the journal, the object store and the weight chain"
    )
    checkpoint_directory: str = Field(description="the model RL begins with")
    problems_directory: str
    split: Split = Split.TRAIN
    problems_limit: int | None = Field(
        default=None, ge=1, description="only the first so many problems; None: all"
    )
    rollout: RolloutConfig = RolloutConfig()
    learning: LearningConfig = LearningConfig()
    harness: HarnessConfig = HarnessConfig()
    grading: GradingConfig = GradingConfig()
    max_steps: int = Field(default=60, ge=1, description="optimiser steps, at most")
    budget_seconds: float | None = Field(
        default=None,
        gt=0,
        description="no new step starts after this much run time, resumptions added; None: never",
    )
    engine_replicas: int = Field(default=1, ge=1, description="decode engines, one process each")
    engine_slots: int = Field(
        default=64, ge=1, description="requests that one engine decodes together"
    )
    decoding: DecodingConfig = DecodingConfig()
    rollout_workers: int = Field(default=1, ge=1, description="processes that drive the harness")


class ReinforcementResult(Frozen):
    """Where the run ended. Its curve is metrics.jsonl of the workspace."""

    checkpoint_directory: str
    steps: int
    weight_version: int
    used_seconds: float
    trajectories: dict[str, int] = Field(description="journal rows by state")
    outcomes: dict[str, int] = Field(
        description="dispatched trajectories of the last process by outcome"
    )
    solve_rate_first: float = Field(description="mean over the first five steps")
    solve_rate_last: float = Field(description="mean over the last five steps")
    hack_rates: dict[str, float] = Field(
        default={}, description="share of the newest trajectories by hack pattern, those seen"
    )
    hack_any_ratio: float = Field(
        default=0.0, description="share of the newest trajectories with any pattern"
    )
    alarms: tuple[str, ...] = Field(
        default=(), description="hack alarms that stood at the end of the last process"
    )


class CheckpointEvaluationRequest(Frozen):
    """An evaluation with the way its attempts are graded."""

    evaluation: EvaluationRequest
    grading: GradingConfig = GradingConfig()


class AttemptsRequest(Frozen):
    """One shard of an evaluation, run by a process of its own."""

    evaluation: EvaluationRequest
    grading: GradingConfig
    index: int = Field(ge=0)
    count: int = Field(ge=1)


class AttemptsResult(Frozen):
    """Where the rows of a shard are."""

    rows_path: str
    attempts: int
