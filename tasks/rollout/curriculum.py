"""Choice of the next problem.

A rule gives each problem its weight in the draw from the results of its groups, in which older results count
less. Unless the recipe allows revisits, each problem is drawn once. The choice is a pure function of the drawn
groups and their results, so a resumed run continues the same curriculum.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.telemetry import MetricsLog, read_lines
from ostinato.tasks.records import Problem
from ostinato.tasks.rollout.config import CURRICULA, CurriculumConfig

HALF_LIFE_GROUPS = 4.0  # later groups of the same problem after which a group counts half
PRIOR_ATTEMPTS = 2.0  # attempts of the prior, half of them solved
FLOOR_WEIGHT = 0.05  # so that solved and hopeless problems are sometimes tried again


@dataclass(slots=True)
class ProblemStatistics:
    """Decayed counts of one problem's results. Recent groups count more."""

    attempts: float = 0.0
    solved: float = 0.0


def log_beta(first: float, second: float) -> float:
    return math.lgamma(first) + math.lgamma(second) - math.lgamma(first + second)


def spread_probability(solved_weight: float, failed_weight: float, group_size: int) -> float:
    """Probability that a group has mixed results under Beta(solved, failed)."""
    base = log_beta(solved_weight, failed_weight)
    all_solved = math.exp(log_beta(solved_weight + group_size, failed_weight) - base)
    all_failed = math.exp(log_beta(solved_weight, failed_weight + group_size) - base)
    return max(0.0, 1.0 - all_solved - all_failed)


# From a problem, the results of its groups so far and the attempts per group, its weight in the next draw: a
# positive number.
ProblemWeight = Callable[[Problem, ProblemStatistics, int], float]


def spread_weight(problem: Problem, results: ProblemStatistics, group_size: int) -> float:
    """Probability that the problem's next group has mixed results, at least FLOOR_WEIGHT."""
    solved = PRIOR_ATTEMPTS / 2 + results.solved
    failed = PRIOR_ATTEMPTS / 2 + (results.attempts - results.solved)
    return max(FLOOR_WEIGHT, spread_probability(solved, failed, group_size))


def uniform_weight(problem: Problem, results: ProblemStatistics, group_size: int) -> float:
    """The same weight for every problem."""
    return 1.0


class Curriculum:
    """Draws problems and updates their weights with the results of finished groups."""

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
        self.group_size = group_size
        self.seed = seed
        self.draws = 0
        self._rule: ProblemWeight = CURRICULA.load(config.weight)
        self._rule_name = config.weight
        self._revisit_groups = config.revisit_groups
        self._last_draw: dict[str, int] = {}  # problem -> number of its newest group
        self._order = sorted(problem.problem_id for problem in problems)
        self._problems = {problem.problem_id: problem for problem in problems}
        self.statistics = {problem_id: ProblemStatistics() for problem_id in self._order}
        self._weights: dict[str, float] = {}  # cache, dropped when a problem's statistics change

    @property
    def is_exhausted(self) -> bool:
        """Whether every problem was drawn and none may be drawn again."""
        return not self._revisit_groups and len(self._last_draw) == len(self._order)

    def weight(self, problem_id: str) -> float:
        """Weight of this problem in the draw. ConfigError when the rule gives no positive number."""
        if problem_id not in self._weights:
            results = self.statistics[problem_id]
            given = self._rule(self._problems[problem_id], results, self.group_size)
            if not isinstance(given, SupportsFloat) or not 0 < float(given) < math.inf:
                raise ConfigError(
                    f"curriculum {self._rule_name!r} gives problem {problem_id} the weight {given!r:.200}, "
                    "wanted a positive number"
                )
            self._weights[problem_id] = float(given)
        return self._weights[problem_id]

    def draw(self, in_flight: Collection[str]) -> Problem:
        """Draws the next problem: if possible one that is not in flight and that may be drawn."""
        if self.is_exhausted:
            raise ValueError(f"all {len(self._order)} problems were drawn, wanted one that was not")
        free = [name for name in self._order if name not in in_flight] or self._order
        candidates = [name for name in free if self._is_drawable(name)] or free
        rng = random.Random(f"{self.seed}:{self.draws}")
        chosen = rng.choices(candidates, [self.weight(name) for name in candidates])[0]
        self._last_draw[chosen] = self.draws
        self.draws += 1
        return self._problems[chosen]

    def observe(self, problem_id: str, *, attempts: int, solved: int) -> None:
        """Adds the result of one group. Problems that are no longer in the pool are ignored."""
        statistics = self.statistics.get(problem_id)
        if statistics is None:
            return
        keep = 0.5 ** (1.0 / HALF_LIFE_GROUPS)
        statistics.attempts = statistics.attempts * keep + attempts
        statistics.solved = statistics.solved * keep + solved
        self._weights.pop(problem_id, None)

    def resume(self, drawn: Mapping[int, str | None]) -> None:
        """Continues after the groups of earlier processes. `drawn`: group number -> problem id, or None if the group
        was not completed, so that its problem may be drawn again.
        """
        for number, problem_id in sorted(drawn.items()):
            if problem_id is not None and problem_id in self._problems:
                self._last_draw[problem_id] = number
            self.draws = max(self.draws, number + 1)

    def _is_drawable(self, problem_id: str) -> bool:
        last = self._last_draw.get(problem_id)
        if last is None:
            return True
        return 0 < self._revisit_groups < self.draws - last


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Result of one group that is about to be committed."""

    group_id: str
    problem_id: str
    attempts: int
    solved: int


class GroupHistory:
    """Append-only file of one run's group results."""

    def __init__(self, path: Path) -> None:
        self._log = MetricsLog(path)
        self._lines = 0

    def append(self, result: GroupResult) -> None:
        self._log.append(self._lines, asdict(result))
        self._lines += 1

    def replay(self, curriculum: Curriculum, committed: Collection[str]) -> int:
        """Adds every committed group in the file to a curriculum once. Returns the number of groups."""
        results: dict[str, dict[str, Any]] = {}
        for row in read_lines(self._log.path):
            if row["group_id"] in committed:
                results.setdefault(row["group_id"], row)
        for row in results.values():
            curriculum.observe(row["problem_id"], attempts=row["attempts"], solved=row["solved"])
        self._lines = len(results)
        return self._lines
