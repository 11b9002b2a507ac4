"""Two trainers' rewards on the same groups of problems: their gains, the paired difference, and how it is shown.

Intervals are of 95 %, by group. What differs from one run to another as a whole is not in them.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import scipy.stats
from pydantic import Field
from rich.console import Console
from rich.table import Table

from ostinato.infra.platform.record import Record
from ostinato.tasks.evaluation.statistics import mean_metric
from ostinato.tasks.records import Metric, Trajectory

CONFIDENCE = 0.95
OURS, PEER = "ostinato", "trl"
# that have to hold 0, those of the figures that there are
DIFFERENCES = ("difference_last_third", "difference_of_gains", "difference_of_problem_gains")


Key = tuple[int, int, str]  # seed, step, problem


class GroupRow(Record):
    """One group, as it was trained on."""

    step: int
    problem_id: str
    rewards: tuple[float, ...]
    solved: int
    tokens: int = Field(description="sampled, of all attempts")

    @property
    def reward(self) -> float:
        """Mean of its attempts."""
        return statistics.fmean(self.rewards)

    @classmethod
    def of(cls, step: int, problem_id: str, attempts: Sequence[Trajectory]) -> "GroupRow":
        return cls(
            step=step,
            problem_id=problem_id,
            rewards=tuple(attempt.reward.total for attempt in attempts),
            solved=sum(attempt.is_solved for attempt in attempts),
            tokens=sum(attempt.transcript.turns[-1].generated_tokens for attempt in attempts),
        )


class Curve(Record):
    """One run of one side."""

    side: str
    seed: int
    groups: tuple[GroupRow, ...]
    step_seconds: tuple[float, ...] = Field(description="wall time, sampling and grading with it")
    grading_seconds: tuple[float, ...] = Field(
        default=(), description="of these, waiting for rewards alone; empty: it is not apart"
    )


def compare(curves: Sequence[Curve]) -> dict[str, Any]:
    """Rewards of the first and the last third of each side, their gains and the paired differences."""
    by_side = {
        side: {
            (curve.seed, row.step, row.problem_id): row
            for curve in curves
            if curve.side == side
            for row in curve.groups
        }
        for side in (OURS, PEER)
    }
    if by_side[OURS].keys() != by_side[PEER].keys():
        raise ValueError("the sides have other problems in their steps, wanted the same ones")
    steps = max(step for _, step, _ in by_side[OURS])
    third = max(1, steps // 3)
    first = [key for key in by_side[OURS] if key[1] <= third]
    last = [key for key in by_side[OURS] if key[1] > steps - third]
    figures: dict[str, Any] = {"steps": steps, "groups": len(by_side[OURS])}
    for side, rows in by_side.items():
        figures[side] = {
            "first_third": _metric(rows[key].reward for key in first),
            "last_third": _metric(rows[key].reward for key in last),
            "gain": gain([rows[key].reward for key in first], [rows[key].reward for key in last]),
            "gain_by_seed": {
                seed: statistics.fmean(rows[key].reward for key in last if key[0] == seed)
                - statistics.fmean(rows[key].reward for key in first if key[0] == seed)
                for seed in sorted({seed for seed, _, _ in rows})
            },
            "solved": statistics.fmean(row.solved / len(row.rewards) for row in rows.values()),
            "tokens_per_attempt": statistics.fmean(
                row.tokens / len(row.rewards) for row in rows.values()
            ),
            "step_seconds": statistics.median(
                seconds for curve in curves if curve.side == side for seconds in curve.step_seconds
            ),
        }
    grading = [seconds for curve in curves for seconds in curve.grading_seconds]
    figures[PEER]["grading_seconds"] = statistics.median(grading)
    apart = {key: by_side[OURS][key].reward - by_side[PEER][key].reward for key in by_side[OURS]}
    figures |= {
        "difference": _metric(apart.values()),
        "difference_last_third": _metric(apart[key] for key in last),
        "difference_of_gains": gain([apart[key] for key in first], [apart[key] for key in last]),
    }
    gains = {side: problem_gains(rows) for side, rows in by_side.items()}
    if gains[OURS]:
        for side, values in gains.items():
            figures[side]["problem_gain"] = _metric(values.values())
        figures["difference_of_problem_gains"] = _metric(
            gains[OURS][key] - gains[PEER][key] for key in gains[OURS]
        )
    return figures


def problem_gains(rows: Mapping[Key, GroupRow]) -> dict[tuple[int, str], float]:
    """Reward of the last group of each problem less that of its first, by seed and problem. Empty where none came twice."""
    visits: dict[tuple[int, str], list[float]] = defaultdict(list)
    for seed, step, name in sorted(rows):
        visits[seed, name].append(rows[seed, step, name].reward)
    return {key: seen[-1] - seen[0] for key, seen in visits.items() if len(seen) > 1}


def gain(first: Sequence[float], last: Sequence[float]) -> dict[str, float]:
    """Difference of the means, with Welch's interval."""
    found = scipy.stats.ttest_ind(last, first, equal_var=False)
    interval = found.confidence_interval(CONFIDENCE)
    mean = statistics.fmean(last) - statistics.fmean(first)
    return {"mean": mean, "low": float(interval.low), "high": float(interval.high)}


def _metric(values: Iterable[float]) -> dict[str, float]:
    found: Metric = mean_metric(list(values), confidence=CONFIDENCE)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def show(curves: Sequence[Curve], figures: dict[str, Any]) -> None:
    """The curves by step and what was compared."""
    console = Console(width=120)
    table = Table("step", *(f"{curve.side} {curve.seed}" for curve in curves))
    for step in range(1, figures["steps"] + 1):
        means = [
            statistics.fmean(row.reward for row in curve.groups if row.step == step)
            for curve in curves
        ]
        table.add_row(str(step), *(f"{mean:.3f}" for mean in means))
    console.print(table)
    totals = Table("", OURS, PEER, "difference, paired")
    apart = {
        "first_third": "",
        "last_third": "difference_last_third",
        "gain": "difference_of_gains",
        "problem_gain": "difference_of_problem_gains",
    }
    for name, difference in apart.items():
        if name not in figures[OURS]:
            continue
        cells = [figures[side][name] for side in (OURS, PEER)]
        cells += [figures[difference]] if difference else []
        totals.add_row(name, *(f"{c['mean']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in cells))
    totals.add_row("s a step", *(f"{figures[side]['step_seconds']:.1f}" for side in (OURS, PEER)))
    console.print(totals)
