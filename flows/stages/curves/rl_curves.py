"""Curves of an RL stage: from its metrics, one row per optimiser step, and from what was measured beside it.

The report, the dashboard and the pictures in Prefect draw them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.flows.stages.curves.report import Curve
from ostinato.flows.stages.run_options import STAGES
from ostinato.infra.platform.cluster.workspace import (
    METRICS,
    PUBLISHED,
    REQUEST,
    RequestEnvelope,
    read_record,
)
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.evaluation.statistics import wilson_interval
from ostinato.tasks.reinforcement.records import EvaluationPoint

_CONFIDENCE = 0.95
_MEASURED_EXPECTED = (
    "Both lines rise, and the band of the last version lies above that of the first; bands that "
    "overlap are no gain yet."
)


class Plot(NamedTuple):
    """Metrics that share one plot."""

    key: str
    title: str
    names: Sequence[str]
    y_label: str
    expected: str
    unit: float = 1.0  # what values are divided by


_PLOTS = (
    Plot(
        "solve-rate",
        "RL: solve rate and reward of sampled attempts",
        ("solve_rate", "reward_mean"),
        f"band: {_CONFIDENCE:.0%} over groups",
        "Both lines rise over tens of steps; a reward that rises while the solve rate does not is earned by "
        "something other than passing tests.",
    ),
    Plot(
        "tokens",
        "RL: tokens per attempt",
        ("generated_tokens_mean",),
        "",
        "The line stays level or falls while the solve rate rises; a steady climb is rambling.",
    ),
    Plot(
        "pacing",
        "RL: tokens per attempt, of the latest sampled and the latest trained ones",
        ("sampled_tokens_mean", "trained_tokens_mean"),
        "",
        "Both lines lie together; a trained one that stays below says that long attempts are left out, and the "
        "policy learns to be short.",
    ),
    Plot(
        "durations",
        "RL: seconds per attempt, of the latest sampled and the latest trained ones",
        ("sampled_seconds_mean", "trained_seconds_mean"),
        "",
        "Both lines lie together; a trained one that stays below says that slow attempts are left out.",
    ),
    Plot(
        "staleness",
        "RL: staleness in versions",
        ("staleness_mean", "staleness_max"),
        "",
        "Both lines level off within a few steps; a climb says that attempts are sampled more slowly "
        "than they are trained on.",
    ),
    Plot(
        "entropy",
        "RL: entropy, nats per token",
        ("entropy_nats",),
        "",
        "The line falls slowly and stays above 0; a fall to 0 says that nothing new is tried any more.",
    ),
    Plot(
        "weight-chain",
        "RL: weight chain, stored size of each version",
        ("published_bytes",),
        "MB",
        "The line stays level, with peaks where a version is stored whole; a steady climb says that each "
        "step changes more of the weights.",
        unit=1e6,
    ),
)


def rl_curves(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """The plots of RL whose metrics the rows have."""
    return list(plotted(_PLOTS, rows))


def plotted(plots: Iterable[Plot], rows: Sequence[Mapping[str, Any]]) -> Iterator[Curve]:
    """The plots whose metrics the rows have."""
    for plot in plots:
        series = {
            name: (
                found[0],
                tuple(None if value is None else value / plot.unit for value in found[1]),
            )
            for name in plot.names
            if (found := series_of(rows, name))[0]
        }
        if series:
            yield Curve(
                key=plot.key,
                title=plot.title,
                expected=plot.expected,
                x_label="step",
                y_label=plot.y_label,
                series=series,
                intervals=_solve_rate_interval(rows) if "solve_rate" in series else {},
            )


def _solve_rate_interval(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """The band of the sampled solve rate. Groups are the sample, as if the attempts of one were all the
    same, so it is never too narrow. None where a row does not count its groups.
    """
    having = [row for row in rows if "solve_rate" in row]
    if not all(row.get("groups", 0) > 0 for row in having):
        return {}
    bounds = [
        wilson_interval(float(row["solve_rate"]), float(row["groups"]), confidence=_CONFIDENCE)
        for row in having
    ]
    return {"solve_rate": (tuple(low for low, _ in bounds), tuple(high for _, high in bounds))}


def evaluation_curves(points: Sequence[EvaluationPoint]) -> list[Curve]:
    """Solve rates measured beside training, with intervals. None where nothing was measured."""
    measured = [
        (point.step, point.attempts_per_problem, point.average, point.best_of)
        for point in points
        if point.average is not None and point.best_of is not None
    ]
    if not measured:
        return []
    steps = tuple(float(step) for step, _, _, _ in measured)
    by_name = {
        "average": [average for _, _, average, _ in measured],
        f"best of {measured[0][1]}": [best for _, _, _, best in measured],
    }
    average = measured[0][2]
    return [
        Curve(
            key="evaluation",
            expected=_MEASURED_EXPECTED,
            title=f"RL: solve rate of each weight version, {average.count} problems, "
            f"{average.confidence:.0%} intervals",
            x_label="step",
            y_label="",
            series={
                name: (steps, tuple(found.mean for found in metrics))
                for name, metrics in by_name.items()
            },
            intervals={
                name: (
                    tuple(found.low for found in metrics),
                    tuple(found.high for found in metrics),
                )
                for name, metrics in by_name.items()
            },
        )
    ]


def measured_curves(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Solve rates measured beside training so far, from the rows of a run under way."""
    points = {row["evaluation_step"]: row for row in rows if "evaluation_step" in row}
    if not points:
        return []
    steps = tuple(float(step) for step in points)

    def values(name: str) -> tuple[float, ...]:
        return tuple(float(row[name]) for row in points.values())

    bands = {"average": "evaluation_average", "best": "evaluation_best_of"}
    return [
        Curve(
            key="evaluation",
            expected=_MEASURED_EXPECTED,
            title="RL: solve rate of each weight version so far",
            x_label="step",
            y_label="",
            series={label: (steps, values(name)) for label, name in bands.items()},
            intervals={
                label: (values(f"{name}_low"), values(f"{name}_high"))
                for label, name in bands.items()
                if all(f"{name}_high" in row for row in points.values())
            },
        )
    ]


def seed_curves(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Curve]:
    """The sampled solve rate of each seed in one plot, where there are several."""
    named = {f"seed {seed}": rows for seed, rows in sorted(runs.items())}
    series = {name: series_of(rows, "solve_rate") for name, rows in named.items()}
    if len(series) < 2:
        return []
    return [
        Curve(
            key="seeds",
            title="RL: solve rate of sampled attempts, newest run of each seed",
            expected="All seeds rise to about the same height; one that stays flat says that the gain is luck.",
            x_label="step",
            y_label=f"bands: {_CONFIDENCE:.0%} over groups",
            series=series,
            intervals={
                name: band
                for name, rows in named.items()
                for band in _solve_rate_interval(rows).values()
            },
        )
    ]


def newest_runs(home: Path, recipe: str, like: Path) -> dict[int, list[dict[str, Any]]]:
    """Steps of the newest finished RL run of each seed of a recipe, as this home has them, of those with the
    settings of the run in `like`.
    """
    stage, found, wanted = STAGES["reinforcement"].kind, {}, _settings_of(like)
    done = (home / "runs").glob(f"{recipe}-seed*/{stage}-*/{PUBLISHED}")
    for mark in sorted(done, key=lambda path: path.stat().st_mtime):
        if _settings_of(mark.parent) != wanted:
            continue
        seed = mark.parents[1].name.removeprefix(f"{recipe}-seed")
        if rows := steps_of(mark.with_name(METRICS)):
            found[int(seed)] = rows
    return found


def _settings_of(run: Path) -> dict[str, Any] | None:
    """Request of a run without its names, its places and what is drawn. None: there is none."""
    envelope = read_record(run / REQUEST, RequestEnvelope)
    return None if envelope is None else _without_seeds(envelope.request)


def _without_seeds(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_seeds(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in ("seed", "run_id") and not name.endswith("_directory")
    }


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Rows of an RL run's steps."""
    return [row for row in read_metrics(metrics) if "solve_rate" in row]


def series_of(
    rows: Sequence[Mapping[str, Any]], name: str
) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Steps and values of one metric, where rows have it. None: no finite number."""
    having = [row for row in rows if name in row]
    values = (float(row[name]) for row in having)
    steps = tuple(float(row["step"]) for row in having)
    return steps, tuple(value if math.isfinite(value) else None for value in values)
