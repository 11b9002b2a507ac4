"""Which problem comes next.

The statistics of every problem (attempts and solves, older ones fading) and the seeded choice. A
problem weighs as much as the probability that a group on it has mixed results, under a Beta
posterior on its solve rate: close to 1 between 10 and 90 percent, close to 0 for solved and
hopeless problems, which a floor keeps in sight. The choice is a pure function of the history and
the number of groups drawn, so a resumed run continues the same curriculum.
"""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ostinato.tasks.records import Problem
from ostinato.tasks.rollout.config import CurriculumConfig


@dataclass(slots=True)
class ProblemStatistics:
    """Results on one problem. Faded counts weigh recent groups more."""

    faded_attempts: float = 0.0
    faded_solved: float = 0.0
    attempts: int = 0
    solved: int = 0
    groups: int = 0
    last_drawn: int = -1  # number of the last group drawn for it; -1: never


def log_beta(first: float, second: float) -> float:
    """Logarithm of the Beta function."""
    return math.lgamma(first) + math.lgamma(second) - math.lgamma(first + second)


def spread_probability(solved_weight: float, failed_weight: float, group_size: int) -> float:
    """Probability that a group has mixed results under Beta(solved, failed)."""
    base = log_beta(solved_weight, failed_weight)
    all_solved = math.exp(log_beta(solved_weight + group_size, failed_weight) - base)
    all_failed = math.exp(log_beta(solved_weight, failed_weight + group_size) - base)
    return max(0.0, 1.0 - all_solved - all_failed)


class Curriculum:
    """Draws problems and learns from the groups that come back."""

    def __init__(
        self,
        problems: Sequence[Problem],
        config: CurriculumConfig,
        *,
        group_size: int,
        seed: int,
    ) -> None:
        if not problems:
            raise ValueError("curriculum has 0 problems, wanted at least 1")
        self.config = config
        self.group_size = group_size
        self.seed = seed
        self.draws = 0
        self._order = sorted(problem.problem_id for problem in problems)
        self._problems = {problem.problem_id: problem for problem in problems}
        self.statistics = {problem_id: ProblemStatistics() for problem_id in self._order}
        self._weights: dict[str, float] = {}  # of problems whose statistics did not change since

    def weight(self, problem_id: str) -> float:
        """Expected worth of a group on this problem, in floor_weight..1."""
        if problem_id not in self._weights:
            self._weights[problem_id] = self._compute_weight(problem_id)
        return self._weights[problem_id]

    def _compute_weight(self, problem_id: str) -> float:
        measured = self._problems[problem_id].solve_rate
        rate = 0.5 if measured is None else min(0.98, max(0.02, measured))
        statistics = self.statistics[problem_id]
        solved = rate * self.config.prior_attempts + statistics.faded_solved
        failed = (1 - rate) * self.config.prior_attempts + (
            statistics.faded_attempts - statistics.faded_solved
        )
        return max(
            self.config.floor_weight,
            spread_probability(solved, failed, self.group_size),
        )

    def draw(self, in_flight: Collection[str]) -> Problem:
        """The next problem, not in flight nor drawn within revisit_groups if others are left."""
        rested = [name for name in self._order if name not in in_flight and self._is_rested(name)]
        waiting = [name for name in self._order if name not in in_flight]
        candidates = rested or waiting or self._order
        chance = random.Random(f"{self.seed}:{self.draws}")
        weights = [self.weight(name) for name in candidates]
        if sum(weights) <= 0:
            weights = [1.0] * len(candidates)
        chosen = chance.choices(candidates, weights=weights)[0]
        self.statistics[chosen].last_drawn = self.draws
        self.draws += 1
        return self._problems[chosen]

    def observe(self, problem_id: str, *, attempts: int, solved: int) -> None:
        """Learns the result of one group. A problem that left the pool is ignored."""
        statistics = self.statistics.get(problem_id)
        if statistics is None:
            return
        keep = 0.5 ** (1.0 / self.config.half_life_groups)
        statistics.faded_attempts = statistics.faded_attempts * keep + attempts
        statistics.faded_solved = statistics.faded_solved * keep + solved
        statistics.attempts += attempts
        statistics.solved += solved
        statistics.groups += 1
        self._weights.pop(problem_id, None)

    def resume(self, draws: int) -> None:
        """Continues after `draws` groups of an earlier process."""
        self.draws = max(self.draws, draws)

    def _is_rested(self, problem_id: str) -> bool:
        last = self.statistics[problem_id].last_drawn
        return last < 0 or self.draws - last > self.config.revisit_groups
