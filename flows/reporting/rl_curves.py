"""Curves of an RL stage from its metrics, one row per optimiser step. The report and the dashboard draw them."""

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.flows.reporting.report import Curve

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


def _series(
    rows: Sequence[Mapping[str, Any]], name: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Steps and values of one metric, where rows have it."""
    having = [row for row in rows if name in row]
    return tuple(float(row["step"]) for row in having), tuple(float(row[name]) for row in having)
