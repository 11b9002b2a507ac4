"""Solve rates that a gate judged, side by side, as a picture in Prefect."""

import io
from collections.abc import Mapping

from matplotlib.figure import Figure

from ostinato.flows.stages.artifacts import optional, show_image
from ostinato.tasks.records import Metric

_KEY = "gate-solve-rates"
_EXPECTED = (
    "The candidate's interval lies beside or above that of what it is held against, and narrow intervals make "
    "the decision a safe one."
)


def show_gate(rates: Mapping[str, Metric], decided: str) -> None:
    """The picture, with what the gate decided and what it looks like when things go well."""
    with optional(_KEY):
        show_image(gate_png(rates), key=_KEY, description=f"{decided}. {_EXPECTED}")


def gate_png(rates: Mapping[str, Metric]) -> bytes:
    """A mean with its interval for each name, the first on top."""
    figure = Figure(figsize=(6.4, 1.2 + 0.45 * len(rates)), dpi=110)
    axes = figure.subplots()
    for place, metric in enumerate(rates.values()):
        axes.plot((metric.low, metric.high), (place, place), color="tab:blue", linewidth=1.4)
        axes.plot(metric.mean, place, "o", color="tab:blue")
    axes.set_yticks(range(len(rates)), list(rates), fontsize=8)
    axes.set_ylim(len(rates) - 0.5, -0.5)
    axes.set_xlabel("solve rate with its interval")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
