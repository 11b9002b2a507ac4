"""What the shards of an evaluation share: the plan of attempts, how it is dealt out, how progress is told."""

from collections.abc import Iterable, Sequence

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.evaluation.attempts import draw_problems, plan_attempts
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest
from ostinato.tasks.records import Problem
from ostinato.tasks.rollout.records import AttemptRequest

SOLVED = "solved_attempts"  # metric


def plan_of(request: EvaluationRequest, problems: Iterable[Problem]) -> list[AttemptRequest]:
    """All attempts of a request. ProblemError when the split has no problem."""
    wanted = [problem for problem in problems if problem.split is request.split]
    if not wanted:
        raise ProblemError(
            f"{request.problems_directory} holds 0 problems of split {request.split}, wanted at least 1; "
            "make some ([problems.sizes], or `split` of a source), or evaluate on another suite"
        )
    drawn = draw_problems(wanted, count=request.config.problems, seed=request.config.seed)
    return plan_attempts(
        drawn,
        attempts_per_problem=request.config.attempts_per_problem,
        seed=request.config.seed,
        temperature=request.config.temperature,
    )


def shard_of(plan: Sequence[AttemptRequest], *, index: int, count: int) -> list[AttemptRequest]:
    """The attempts of one shard. All attempts at a problem stay together, so that verdicts are cached once."""
    names = list(dict.fromkeys(item.problem.problem_id for item in plan))
    mine = set(names[index::count])
    return [item for item in plan if item.problem.problem_id in mine]


def tell_progress(workspace: Workspace, done: float, total: int, solved: float) -> None:
    """Shows attempts done of `total`, and the solve rate so far. At least one is done."""
    message = f"attempts, solve rate {solved / done:.2f}"
    workspace.progress.update(done, total, message, **{SOLVED: solved})
