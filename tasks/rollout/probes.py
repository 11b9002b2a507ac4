"""Choice of RL's problems by probes: a scorecard of a checkpoint's attempts at the training problems."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.records import Problem, Scorecard
from ostinato.tasks.rollout.config import PROBES_FILE, RolloutConfig
from ostinato.tasks.rollout.curriculum import Curriculum

logger = logging.getLogger(__name__)


def open_curriculum(
    problems: Sequence[Problem], config: RolloutConfig, probes_directory: str | None
) -> Curriculum:
    """The curriculum at the beginning of a run. With probes it holds the problems that they leave, and begins with
    their counts.
    """
    probes = None
    if probes_directory is not None:
        text = (Path(probes_directory) / PROBES_FILE).read_bytes()
        probes = Scorecard.model_validate_json(text)
        problems = choose_probed(
            problems, probes, unsolved_share=config.curriculum.unsolved_share, seed=config.seed
        )
    curriculum = Curriculum(
        problems, config.curriculum, group_size=config.group_size, seed=config.seed
    )
    for score in () if probes is None else probes.problems:
        curriculum.observe(score.problem_id, attempts=score.attempts, solved=score.solved)
    return curriculum


def choose_probed(
    problems: Sequence[Problem], probes: Scorecard, *, unsolved_share: float, seed: int
) -> list[Problem]:
    """The problems with mixed results, a share of those that no attempt solved, and those that were not probed. Each
    has its solve rate. A larger share keeps the problems of a smaller one. ProblemError if none is left.
    """
    rates = {score.problem_id: score.solved / score.attempts for score in probes.problems}
    rated = [
        problem.model_copy(update={"solve_rate": rates.get(problem.problem_id)})
        for problem in problems
    ]
    unsolved = sorted(problem.problem_id for problem in rated if problem.solve_rate == 0)
    random.Random(f"probes:{seed}").shuffle(unsolved)
    left_out = set(unsolved[round(unsolved_share * len(unsolved)) :])
    kept = [one for one in rated if one.solve_rate != 1 and one.problem_id not in left_out]
    counts = {
        "problems": len(rated),
        "solved_left_out": sum(one.solve_rate == 1 for one in rated),
        "unsolved_left_out": len(left_out),
        "kept": len(kept),
    }
    logger.info("problems by probes %s", fields(checkpoint=probes.checkpoint, **counts))
    if not kept:
        raise ProblemError(
            f"probes of {probes.checkpoint} leave 0 of {len(rated)} problems: every attempt solved "
            f"{counts['solved_left_out']}, and none solved {len(unsolved)}, of which "
            f"rollout.curriculum.unsolved_share={unsolved_share:g} keeps none; wanted at least 1 problem: "
            "raise that share, or take other problems"
        )
    return kept
