"""The report of a run: a table for the console, an HTML page with plots."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from pydantic import Field
from rich.table import Table

from ostinato.flows.stages.curves.pages import render
from ostinato.infra.platform.record import Record


class ReportRow(NamedTuple):
    """One stage's before and after."""

    stage: str
    measure: str
    before: str
    after: str
    note: str = ""


class StageTime(NamedTuple):
    """The time that one stage took. Pauses of a run that was ended and went on are within."""

    stage: str
    began: str
    seconds: str


class Curve(Record):
    """One plot: its series, and what it looks like when things go well."""

    key: str = Field(description="of its picture in Prefect, after the stage's name")
    title: str
    expected: str = Field(description="one sentence: how it looks when things go well")
    x_label: str
    y_label: str
    series: dict[str, tuple[tuple[float, ...], tuple[float | None, ...]]] = Field(
        description="steps and values; None: no finite number, as of a model that diverged"
    )
    intervals: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = Field(
        default={}, description="low and high of a series, drawn as a band"
    )


class RunPage(NamedTuple):
    """Content of the page of a run. The first curve stands below the headline."""

    title: str
    headline: ReportRow
    controls: Sequence[ReportRow]
    curves: Sequence[Curve]
    rows: Sequence[ReportRow]
    links: Mapping[str, str]  # addresses of example attempts
    times: Sequence[StageTime]
    facts: Mapping[str, str]


class _Picture(NamedTuple):
    title: str
    expected: str
    png: str


def console_table(rows: Sequence[ReportRow], title: str) -> Table:
    """The rows for a terminal."""
    table = Table(*ReportRow._fields, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def plot_png(curve: Curve) -> bytes:
    """The curve as a PNG. Threads may draw at once: it uses nothing of pyplot, whose figures they would share."""
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
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def write_html(path: Path, page: RunPage) -> Path:
    """Writes one self-contained page and returns its path."""
    pictures = [
        _Picture(curve.title, curve.expected, base64.b64encode(plot_png(curve)).decode())
        for curve in page.curves
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render("report", pictures=pictures, **page._asdict()))
    return path
