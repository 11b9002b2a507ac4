"""One evaluation: the problems of a suite, some attempts each, one scorecard.

EvaluationRequest and EvaluationResult, the split of the work into shards (one process each, so that
every core is used) and the merge of their rows. How an attempt is made comes from flows, which join
this stage with the rollout worker.
"""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.agent.config import HarnessConfig
from ostinato.models.decode.config import DecodingConfig
from ostinato.tasks.evaluation.attempts import PlannedAttempt, draw_problems, plan_attempts
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.evaluation.locating import LocatingRow
from ostinato.tasks.evaluation.statistics import AttemptRow, scorecard_from
from ostinato.tasks.records import Problem, Scorecard, Split


class Frozen(BaseModel):
    """Frozen. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EvaluationRequest(Frozen):
    """One evaluation: checkpoint, problems and settings."""

    checkpoint_directory: str
    checkpoint_name: str = Field(description="what the scorecard calls the checkpoint")
    problems_directory: str = Field(
        description="problems and prepared repositories, as the problems stage left them"
    )
    split: Split = Split.HELD_OUT
    suite: str = Field(default="", description="name on the scorecard; empty: the split")
    config: EvaluationConfig = EvaluationConfig()
    harness: HarnessConfig = HarnessConfig()
    engine_slots: int = Field(
        default=32, ge=1, description="attempts decoded together in one process"
    )
    decoding: DecodingConfig = DecodingConfig()
    processes: int = Field(default=2, ge=1, description="shards that run at the same time")
    search_directory: str | None = Field(
        default=None, description="encoder of the search service; None: words alone"
    )
    context_tokens: int = Field(
        default=0, ge=0, description="longest conversation the engine holds; 0: the model's"
    )
    notes_locating: bool = Field(
        default=False, description="also note what each attempt spent on finding the function"
    )


class EvaluationResult(Frozen):
    """The scorecard and what it took."""

    scorecard: Scorecard
    rows: tuple[AttemptRow, ...]
    wall_seconds: float
    locating: tuple[LocatingRow, ...] = Field(default=(), description="empty unless asked for")


def plan_of(request: EvaluationRequest, problems: Iterable[Problem]) -> list[PlannedAttempt]:
    """All attempts of a request."""
    wanted = [problem for problem in problems if problem.split is request.split]
    drawn = draw_problems(wanted, count=request.config.problems, seed=request.config.seed)
    return plan_attempts(
        drawn,
        attempts_per_problem=request.config.attempts_per_problem,
        seed=request.config.seed,
    )


def shard_of(plan: Sequence[PlannedAttempt], *, index: int, count: int) -> list[PlannedAttempt]:
    """Attempts of one shard. Those at one problem stay together, to share cached verdicts."""
    names = list(dict.fromkeys(item.problem.problem_id for item in plan))
    mine = set(names[index::count])
    return [item for item in plan if item.problem.problem_id in mine]


def score(request: EvaluationRequest, rows: Iterable[AttemptRow]) -> Scorecard:
    """The scorecard of all rows."""
    return scorecard_from(
        rows,
        suite=request.suite or request.split.value,
        checkpoint=request.checkpoint_name,
        temperature=request.config.temperature,
        confidence=request.config.confidence,
    )
