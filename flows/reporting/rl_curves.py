"""Curves of an RL stage from its metrics, one row per optimiser step. The report and the dashboard draw them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.flows.reporting.report import Curve
from ostinato.flows.stages.run_options import STAGES
from ostinato.infra.platform.cluster.workspace import METRICS, PUBLISHED
from ostinato.infra.platform.telemetry import read_metrics

_PLOTS = (
    ("RL: solve rate and reward of sampled attempts", ("solve_rate", "reward_mean")),
    ("RL: tokens per attempt", ("generated_tokens_mean",)),
    ("RL: staleness in versions", ("staleness_mean", "staleness_max")),
    ("RL: entropy, nats per token", ("entropy_nats",)),
)


def rl_curves(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """The plots whose metrics the rows have."""
    curves = []
    for title, names in _PLOTS:
        series = {name: found for name in names if (found := _series(rows, name))[0]}
        if series:
            curves.append(Curve(title=title, x_label="step", y_label="", series=series))
    return curves


def seed_curves(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Curve]:
    """The sampled solve rate of each seed in one plot, where there are several."""
    series = {f"seed {seed}": _series(rows, "solve_rate") for seed, rows in sorted(runs.items())}
    if len(series) < 2:
        return []
    title = "RL: solve rate of sampled attempts, newest run of each seed"
    return [Curve(title=title, x_label="step", y_label="", series=series)]


def newest_runs(home: Path, recipe: str) -> dict[int, list[dict[str, Any]]]:
    """Steps of the newest finished RL run of each seed of a recipe, as this home has them."""
    stage, found = STAGES["reinforcement"].kind, {}
    done = (home / "runs").glob(f"{recipe}-seed*/{stage}-*/{PUBLISHED}")
    for mark in sorted(done, key=lambda path: path.stat().st_mtime):
        seed = mark.parents[1].name.removeprefix(f"{recipe}-seed")
        if rows := steps_of(mark.with_name(METRICS)):
            found[int(seed)] = rows
    return found


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Rows of an RL run's steps."""
    return [row for row in read_metrics(metrics) if "solve_rate" in row]


def _series(
    rows: Sequence[Mapping[str, Any]], name: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Steps and values of one metric, where rows have it."""
    having = [row for row in rows if name in row]
    return tuple(float(row["step"]) for row in having), tuple(float(row[name]) for row in having)
