"""Settings, request and result of a reinforcement run."""

from pydantic import Field

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.egress.config import SandboxConfig
from ostinato.models.decode.config import DecodingConfig
from ostinato.models.training.config import PLACEMENT
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.records import Metric, Split
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.rollout.config import RolloutConfig

WEIGHTS = "weights"  # metric of a replay that compares the bits of all weights
STEPS_FOLDER = "steps"  # in a run's workspace: its step checkpoints


class OnlineEvaluationConfig(EvaluationConfig):
    """Evaluation of the policy while it trains, on an engine replica of its own."""

    every_steps: int | None = Field(
        default=None,
        ge=1,
        description="optimiser steps between evaluations, which begin with the initial weights; an evaluation that is "
        "due while another runs is skipped, except the last one, which is made after the run; None: never",
    )
    split: Split = Field(default=Split.HELD_OUT, description="split that the problems come from")


class ReinforcementConfig(Record):
    """Length and size of the RL run. `learning` and `rollout` say how it learns and samples."""

    max_steps: int = Field(default=60, ge=1, description="optimiser steps, at most")
    budget_seconds: float | None = Field(
        default=None,
        gt=0,
        description="run time after which no new step starts, summed over resumed processes; None: no limit",
    )
    engine_replicas: int = Field(default=1, ge=1, description="decode engines, one process each")
    engine_slots: int = Field(
        default=64, ge=1, description="requests that one engine decodes together"
    )
    rollout_workers: int = Field(default=1, ge=1, description="processes that drive the harness")
    evaluation: OnlineEvaluationConfig = OnlineEvaluationConfig()


class ReinforcementRequest(ReinforcementConfig):
    """One RL run."""

    run_id: str = Field(
        description="names the run in the journal, the object store and the weight chain"
    )
    checkpoint_directory: str = Field(description="checkpoint of the initial model")
    problems_directory: str
    split: Split = Split.TRAIN
    rollout: RolloutConfig = RolloutConfig()
    sandboxes: SandboxConfig = SandboxConfig()
    learning: LearningConfig = LearningConfig()
    harness: HarnessConfig = HarnessConfig()
    grading: GradingConfig = GradingConfig()
    decoding: DecodingConfig = DecodingConfig()
    search_directory: str | None = Field(
        default=None, description="encoder of code search; None: search by words only"
    )
    probes_directory: str | None = Field(
        default=None, description="probes of the problems; None: RL begins without solve rates"
    )

    def placement(self) -> dict[str, set[str]]:
        """Fields that say where the run is computed and do not change its result."""
        return {"learning": PLACEMENT}


class EvaluationPoint(Record):
    """Solve rates of one weight version, measured during the run."""

    step: int = Field(description="optimiser steps that led to the version")
    weight_version: int
    attempts_per_problem: int
    average: Metric | None = Field(description="solve rate of single attempts; None: not measured")
    best_of: Metric | None = Field(
        description="share of problems that any attempt solved; None: not measured"
    )
    reason: str = Field(default="", description="why it was not measured")
    seconds: float = Field(
        default=0.0, description="time from the pinning of the version to its rates"
    )


class ReinforcementResult(Record):
    """Result of a run. The metrics of its steps are in metrics.jsonl of the workspace."""

    checkpoint_directory: str
    steps: int
    weight_version: int
    used_seconds: float
    ended_by: str = Field(
        default="", description="limit that ended the run: max_steps, budget_seconds or problems"
    )
    trajectories: dict[str, int] = Field(description="journal rows by state")
    outcomes: dict[str, int] = Field(
        description="dispatched trajectories of the last process by outcome"
    )
    solve_rate_first: float = Field(description="mean over the first five steps")
    solve_rate_last: float = Field(description="mean over the last five steps")
    hack_rates: dict[str, float] = Field(
        default={}, description="share of the newest trajectories by hack pattern, above 0"
    )
    hack_any_ratio: float = Field(
        default=0.0, description="share of the newest trajectories with any pattern"
    )
    alarms: tuple[str, ...] = Field(
        default=(), description="alarms that were on at the end of the last process"
    )
    evaluations: tuple[EvaluationPoint, ...] = Field(
        default=(),
        description="evaluations ordered by step; empty unless the recipe asks for them",
    )


class ReplayRequest(Record):
    """Steps of a run to compute again."""

    run: ReinforcementRequest
    run_directory: str = Field(description="workspace of the run")
    steps: tuple[int, ...] = Field(description="ascending")
    metric: str = Field(default=WEIGHTS, description="weights, or a name in metrics.jsonl")


class ReplayedStep(Record):
    """Comparison of a recorded step with the same step computed again."""

    step: int
    is_equal: bool = Field(description="whether the requested metric is equal")
    tensors: int
    different_tensors: int
    largest_difference: float = Field(description="largest absolute difference of any weight")
    different_metrics: dict[str, tuple[float, float]] = Field(
        description="recorded and replayed value of each metric that differs"
    )


class ReplayReport(Record):
    """Replayed steps, in the order they were computed."""

    steps: tuple[ReplayedStep, ...]

    @property
    def first_different(self) -> int | None:
        """The earliest replayed step that differs. None: all are equal."""
        return min((found.step for found in self.steps if not found.is_equal), default=None)
