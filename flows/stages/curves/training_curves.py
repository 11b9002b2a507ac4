"""Curves of a stage that trains with a loss, and how curves of any stage become pictures in Prefect."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.flows.stages.artifacts import optional, show_image
from ostinato.flows.stages.curves.report import Curve, plot_png
from ostinato.flows.stages.curves.rl_curves import Plot, measured_curves, plotted, rl_curves
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.pretraining.config import Perplexity

_LOSS_EXPECTED = (
    "The line falls quickly and then slowly; a jump is the start of another phase, and a lasting climb is too "
    "high a learning rate."
)
_PERPLEXITY_EXPECTED = (
    "Lines fall and level off while code is read; a climb in the phase of transcripts is usual, an earlier one "
    "is over-fitting or forgetting."
)
_DRAFT_EXPECTED = "All lines are far lower at the last step, where they are measured again, the first depth below the others."
_DRAFT_METRIC = "kl_nats_"  # and the depth


def stage_curves(metrics: Path) -> list[Curve]:
    """Plots of a stage, whichever it is, from its metrics so far."""
    rows = read_metrics(metrics)
    steps = [row for row in rows if "solve_rate" in row]
    return measured_curves(steps) + rl_curves(steps) if steps else training_curves(rows)


def training_curves(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Loss, held-out perplexity and distance of draft layers, where rows have them."""
    depths = sorted({name for row in rows for name in row if name.startswith(_DRAFT_METRIC)})
    perplexity = ("perplexity", "held-out perplexity", ("perplexity",), "perplexity")
    plots = (
        Plot("loss", "training loss", ("loss",), "nats per token", _LOSS_EXPECTED),
        Plot(*perplexity, _PERPLEXITY_EXPECTED),
        Plot("kl", "draft layers: KL to the main head", depths, "nats", _DRAFT_EXPECTED),
    )
    return list(plotted(plots, rows))


def perplexity_curve(evaluations: Sequence[Perplexity]) -> Curve:
    """Held-out perplexity of each source through the phases."""
    steps = tuple(float(item.step) for item in evaluations)
    return Curve(
        key="perplexity",
        title="held-out perplexity",
        expected=_PERPLEXITY_EXPECTED,
        x_label="step",
        y_label="perplexity",
        series={
            name: (steps, tuple(item.by_source[name] for item in evaluations))
            for name in evaluations[0].by_source
        },
    )


def show_curves(stage: str, ref: ArtifactRef, curves: Sequence[Curve]) -> None:
    """A picture of each plot of a finished stage, with what it looks like when things go well."""
    for curve in curves:
        key = f"{stage}-{curve.key}"
        with optional(key):
            show_image(plot_png(curve), key=key, description=f"{curve.expected} ({ref})")
