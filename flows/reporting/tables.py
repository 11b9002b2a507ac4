"""Tables of figures for the terminal and in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ostinato.tasks.records import Metric

NOT_MEASURED = "not measured"


class ReportRow(NamedTuple):
    """A measure before and after a stage."""

    stage: str
    measure: str
    before: str
    after: str
    note: str = ""
    key: str = ""  # of a row that the console shows too; empty: on the page and in Prefect alone


def share(ratio: float | None) -> str:
    """A ratio in percent. None: not measured."""
    return NOT_MEASURED if ratio is None else f"{ratio:.1%}"


def rounded(number: float | None) -> str:
    """A mean with one decimal. None: not measured."""
    return NOT_MEASURED if number is None else f"{number:.1f}"


def interval(metric: Metric) -> str:
    """A mean with its bounds, in percent."""
    return f"{metric.mean:.1%} [{metric.low:.1%}, {metric.high:.1%}]"


def print_table(
    console: Console,
    rows: Sequence[Mapping[str, object]],
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Prints rows as a table. The keys of the first row are the column names."""
    table = Table(*(rows[0] if rows else ()), title=title, caption=caption)
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)


def markdown_table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Lines of a table with text in its first column and numbers in the others. No lines without rows."""
    if rows:
        yield f"| {' | '.join(rows[0])} |"
        yield "| --- |" + " ---: |" * (len(rows[0]) - 1)
        yield from (f"| {' | '.join(map(str, row.values()))} |" for row in rows)
        yield ""
