"""Baselines: the expected reward of a population and problem kind, for one rollout per prompt.

A cell with few observations is shrunk towards the overall mean, which is shrunk towards 0. Within a
batch an observation is left out of its own baseline, so that the baseline does not bias the policy
gradient.
"""

from collections import defaultdict
from collections.abc import Sequence

from pydantic import Field

from ostinato.tasks.realtime.config import BaselineConfig
from ostinato.tasks.records import StageRecord

_KIND_STRENGTH = 8.0  # weight of the overall mean in a cell's expectation, in observations
_OVERALL_STRENGTH = 4.0  # weight of a reward of 0 in the overall mean, in observations


class DistilledReward(StageRecord):
    """One interaction's reward, -1..1. The rewards of one feedback are one observation."""

    interaction_id: str
    judged_id: str
    """interaction whose feedback counts: itself, or a later one of its session (`feedback/sessions.py`)"""
    population: str
    problem_kind: str
    reward: float
    reason: str = Field(description="name of the largest term by absolute value")
    terms: dict[str, float] = Field(description="all terms before the sum is clipped to -1..1")


class Cell(StageRecord):
    """Observed rewards of one (population, problem kind)."""

    population: str
    problem_kind: str
    weight: float = Field(description="decayed number of observations")
    reward_sum: float


class Baselines(StageRecord):
    """All cells. Empty before the first cycle."""

    cells: tuple[Cell, ...] = ()

    def expected(self, population: str, problem_kind: str) -> float:
        """Expected reward of the cell, from earlier cycles only."""
        return _Totals(self).expected((population, problem_kind))

    def absorb(self, rewards: Sequence[DistilledReward], config: BaselineConfig) -> "Baselines":
        """Baselines after a cycle: earlier counts are decayed and these observations added."""
        totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for cell in self.cells:
            totals[cell.population, cell.problem_kind][0] += config.decay * cell.weight
            totals[cell.population, cell.problem_kind][1] += config.decay * cell.reward_sum
        for (population, kind, _), mean in _means(rewards).items():
            totals[population, kind][0] += 1
            totals[population, kind][1] += mean
        return Baselines(
            cells=tuple(
                Cell(population=population, problem_kind=kind, weight=weight, reward_sum=reward_sum)
                for (population, kind), (weight, reward_sum) in sorted(totals.items())
            )
        )


def advantages(rewards: Sequence[DistilledReward], baselines: Baselines) -> list[float]:
    """Each reward minus its baseline, parallel to `rewards`.

    The baseline counts earlier cycles and the rest of this batch, not the observation itself, nor others that the
    same feedback is about.
    """
    totals = _Totals(baselines)
    means = _means(rewards)
    for (population, kind, _), mean in means.items():
        totals.add((population, kind), 1.0, mean)
    result = []
    for seen in rewards:
        cell = (seen.population, seen.problem_kind)
        mean = means[*cell, seen.judged_id]
        totals.add(cell, -1.0, -mean)
        result.append(seen.reward - totals.expected(cell))
        totals.add(cell, 1.0, mean)
    return result


def _means(rewards: Sequence[DistilledReward]) -> dict[tuple[str, str, str], float]:
    """Mean reward by population, problem kind and judged interaction."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for seen in rewards:
        found[seen.population, seen.problem_kind, seen.judged_id].append(seen.reward)
    return {key: sum(values) / len(values) for key, values in found.items()}


class _Totals:
    """Running sums by cell and overall."""

    def __init__(self, baselines: Baselines) -> None:
        self._weight: dict[tuple[str, str], float] = defaultdict(float)
        self._reward: dict[tuple[str, str], float] = defaultdict(float)
        self._all_weight = self._all_reward = 0.0
        for cell in baselines.cells:
            self.add((cell.population, cell.problem_kind), cell.weight, cell.reward_sum)

    def add(self, key: tuple[str, str], weight: float, reward: float) -> None:
        self._weight[key] += weight
        self._reward[key] += reward
        self._all_weight += weight
        self._all_reward += reward

    def expected(self, key: tuple[str, str]) -> float:
        overall = self._all_reward / (self._all_weight + _OVERALL_STRENGTH)
        return (self._reward[key] + _KIND_STRENGTH * overall) / (self._weight[key] + _KIND_STRENGTH)
