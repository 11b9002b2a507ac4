"""Curves of stages from their metrics and results, for the report, the dashboard and the pictures in Prefect."""

import fnmatch
import io
import itertools
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from pydantic import Field

from ostinato.flows.stages.artifacts import optional, show_image
from ostinato.flows.stages.declared import REINFORCEMENT
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.workspace import (
    METRICS,
    PUBLISHED,
    REQUEST,
    RequestEnvelope,
    read_record,
)
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.evaluation.statistics import wilson_interval
from ostinato.tasks.pretraining.config import Perplexity
from ostinato.tasks.reinforcement.records import EvaluationPoint

Rows = Sequence[Mapping[str, Any]]
_Numbers = tuple[float, ...]
_CONFIDENCE = 0.95
_MEASURED_EXPECTED = (
    "Both lines rise, and the band of the last version lies above that of the first; overlapping bands "
    "do not show a gain yet."
)


class Curve(Record):
    """A plot of one or several series."""

    key: str = Field(description="last part of the key of its picture in Prefect")
    title: str
    expected: str = Field(description="sentence on how the plot looks when things go well")
    x_label: str = "step"
    y_label: str = ""
    section: str = Field(default="", description="heading on the dashboard's page of a run")
    starts_at_zero: bool = Field(
        default=False, description="the vertical axis contains 0, as for shares"
    )
    series: dict[str, tuple[_Numbers, tuple[float | None, ...]]] = Field(
        description="steps and values; None: not a finite number, as when a model diverged"
    )
    intervals: dict[str, tuple[_Numbers, _Numbers]] = Field(
        default={}, description="low and high of a series, drawn as a band"
    )


class Plot(NamedTuple):
    """Declaration of a plot in curves.toml: metrics that share it."""

    key: str
    title: str
    expected: str
    names: Sequence[str] = ()  # of metrics; `*` stands for any part of a name
    y_label: str = ""
    unit: float = 1.0  # divisor of the values
    section: str = ""
    starts_at_zero: bool = False
    is_pictured: bool = True  # false: drawn on the dashboard alone


_PLOTS = {
    stage: {plot["key"]: Plot(**plot) for plot in plots}
    for stage, plots in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}


def stage_curves(metrics: Path) -> list[Curve]:
    """The pictures of any stage from its current metrics."""
    rows = read_metrics(metrics)
    steps = [row for row in rows if "solve_rate" in row]
    return measured_curves(steps) + rl_curves(steps) if steps else training_curves(rows)


def panels(rows: Rows) -> list[Curve]:
    """All plots of a stage's metrics, for the dashboard."""
    steps = [row for row in rows if "solve_rate" in row]
    if not steps:
        return training_curves(rows)
    return measured_curves(steps) + list(_plotted(_PLOTS["rl"].values(), steps))


def rl_curves(rows: Rows) -> list[Curve]:
    """The pictures of the RL metrics that the rows have."""
    return list(_plotted((plot for plot in _PLOTS["rl"].values() if plot.is_pictured), rows))


def training_curves(rows: Rows) -> list[Curve]:
    """Plots of loss, held-out perplexity and draft layers' KL, as far as the rows have them."""
    return list(_plotted(_PLOTS["training"].values(), rows))


def perplexity_curve(evaluations: Sequence[Perplexity]) -> Curve:
    """Plot of each source's held-out perplexity through the phases."""
    plot = _PLOTS["training"]["perplexity"]
    steps = tuple(float(item.step) for item in evaluations)
    return Curve(
        key=plot.key,
        title=plot.title,
        expected=plot.expected,
        y_label=plot.y_label,
        series={
            name: (steps, tuple(item.by_source[name] for item in evaluations))
            for name in evaluations[0].by_source
        },
    )


def _plotted(plots: Iterable[Plot], rows: Rows) -> Iterator[Curve]:
    known = list(dict.fromkeys(name for row in rows for name in row))
    for plot in plots:
        named = dict.fromkeys(
            name for wanted in plot.names for name in fnmatch.filter(known, wanted)
        )
        found = {name: _series_of(rows, name, plot.unit) for name in named}
        series = {name: values for name, values in found.items() if values[0]}
        if any("*" in name for name in plot.names):  # of dozens of terms most are 0 at every step
            moving = {name: values for name, values in series.items() if any(values[1])}
            series = moving or dict(itertools.islice(series.items(), 1))
        if series:
            yield Curve(
                key=plot.key,
                title=plot.title,
                expected=plot.expected,
                y_label=plot.y_label,
                section=plot.section,
                starts_at_zero=plot.starts_at_zero,
                series=series,
                intervals=_solve_rate_interval(rows) if "solve_rate" in series else {},
            )


def _series_of(
    rows: Rows, name: str, unit: float = 1.0
) -> tuple[_Numbers, tuple[float | None, ...]]:
    """Steps and values of a metric in its unit, from the rows that have it. None: not a finite number."""
    having = [row for row in rows if name in row]
    values = (float(row[name]) / unit for row in having)
    steps = tuple(float(row["step"]) for row in having)
    return steps, tuple(value if math.isfinite(value) else None for value in values)


def _solve_rate_interval(rows: Rows) -> dict[str, tuple[_Numbers, _Numbers]]:
    """The band of the sampled solve rate. The sample size is the number of groups, as if all attempts of a group
    were the same, so the band is never too narrow. Empty when a row has no number of groups.
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
    """Solve rates measured during training, with intervals. Empty when nothing was measured."""
    measured = [
        (float(point.step), point.average, point.best_of)
        for point in points
        if point.average is not None and point.best_of is not None
    ]
    if not measured:
        return []
    steps, averages, bests = zip(*measured, strict=True)
    named = {"average": averages, f"best of {points[0].attempts_per_problem}": bests}
    first = averages[0]
    title = (
        f"RL: solve rate of each weight version, {first.count} problems, "
        f"{first.confidence:.0%} intervals"
    )
    bands = {
        name: [(one.mean, one.low, one.high) for one in found] for name, found in named.items()
    }
    return [_measured_curve(title, steps, bands)]


def measured_curves(rows: Rows) -> list[Curve]:
    """Solve rates measured so far during training, from the rows of a run in progress."""
    points = {row["evaluation_step"]: row for row in rows if "evaluation_step" in row}
    if not points:
        return []
    metrics = {"average": "evaluation_average", "best": "evaluation_best_of"}
    bands = {
        label: [
            (float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"]))
            for row in points.values()
        ]
        for label, name in metrics.items()
    }
    title = "RL: solve rate of each weight version so far"
    return [_measured_curve(title, tuple(float(step) for step in points), bands)]


def _measured_curve(
    title: str, steps: _Numbers, bands: Mapping[str, Sequence[tuple[float, float, float]]]
) -> Curve:
    """Plot of measured solve rates. `bands`: mean, low and high at each step, by series."""
    columns = {name: tuple(zip(*found, strict=True)) for name, found in bands.items()}
    return Curve(
        key="evaluation",
        title=title,
        expected=_MEASURED_EXPECTED,
        section=_PLOTS["rl"]["solve-rate"].section,
        starts_at_zero=True,
        series={name: (steps, means) for name, (means, _, _) in columns.items()},
        intervals={name: (low, high) for name, (_, low, high) in columns.items()},
    )


def seed_curves(runs: Mapping[int, Rows]) -> list[Curve]:
    """A plot of each seed's sampled solve rate. Empty for fewer than two seeds."""
    if len(runs) < 2:
        return []
    named = {f"seed {seed}": rows for seed, rows in sorted(runs.items())}
    return [
        Curve(
            key="seeds",
            title="RL: solve rate of sampled attempts, newest run of each seed",
            expected="All seeds rise to about the same height; a flat seed suggests that the gain is luck.",
            y_label=f"bands: {_CONFIDENCE:.0%} over groups",
            series={name: _series_of(rows, "solve_rate") for name, rows in named.items()},
            intervals={
                name: band
                for name, rows in named.items()
                for band in _solve_rate_interval(rows).values()
            },
        )
    ]


def newest_runs(home: Path, recipe: str, like: Path) -> dict[int, list[dict[str, Any]]]:
    """Rows of each seed's newest finished RL run of a recipe in this home. Only runs with the settings of the run in
    `like` count.
    """
    stage, found, wanted = REINFORCEMENT.kind, {}, _settings_of(like)
    done = (home / "runs").glob(f"{recipe}-seed*/{stage}-*/{PUBLISHED}")
    for mark in sorted(done, key=lambda path: path.stat().st_mtime):
        if _settings_of(mark.parent) != wanted:
            continue
        seed = mark.parents[1].name.removeprefix(f"{recipe}-seed")
        if rows := steps_of(mark.with_name(METRICS)):
            found[int(seed)] = rows
    return found


def _settings_of(run: Path) -> dict[str, Any] | None:
    """A run's request without run id, directories and seeds. None: the run has no request."""
    envelope = read_record(run / REQUEST, RequestEnvelope)
    return None if envelope is None else _without_seeds(envelope.request)


def _without_seeds(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_seeds(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in ("seed", "run_id") and not name.endswith("_directory")
    }


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """The metrics rows of an RL run's steps."""
    return [row for row in read_metrics(metrics) if "solve_rate" in row]


def show_curves(stage: str, ref: ArtifactRef, curves: Sequence[Curve], link: str) -> None:
    """Shows each plot of a finished stage as a picture in Prefect, described by its `expected` and `link`."""
    for curve in curves:
        key = f"{stage}-{curve.key}"
        with optional(key):
            show_image(plot_png(curve), key=key, description=f"{curve.expected} ({ref}) {link}")


def plot_png(curve: Curve) -> bytes:
    """The curve as a PNG. Threads may draw at the same time, because pyplot with its shared figures is not used."""
    figure = Figure(figsize=(6.4, 3.4), dpi=110)
    axes = figure.subplots()
    for label, (x_values, y_values) in curve.series.items():
        numbers = [math.nan if value is None else value for value in y_values]
        axes.plot(x_values, numbers, label=label, linewidth=1.4)
        if label in curve.intervals:
            axes.fill_between(x_values, *curve.intervals[label], alpha=0.2)
    axes.set_title(curve.title, fontsize=10)
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.y_label)
    axes.grid(alpha=0.3)
    if len(curve.series) > 1:
        axes.legend(fontsize=8)
    return figure_png(figure)


def figure_png(figure: Figure) -> bytes:
    """A figure as a PNG."""
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
