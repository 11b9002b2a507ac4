"""What `ostinato run controls` measured for shipped recipes, beside the code, so that a report can show it next
to its own run.

In all of them the trained checkpoint takes fewer tokens than one attempt of its start, so restarts and best of n
at equal tokens are the start itself.
"""

import json
from pathlib import Path

from pydantic import Field

from ostinato.flows.stages.curves.report import ReportRow
from ostinato.infra.platform.record import Record

_FILE = Path(__file__).with_suffix(".json")


class CommittedControls(Record):
    """One seed of a recipe on held-out mutations."""

    recipe: str
    seed: int
    commit: str
    date: str
    start_solved: float
    trained_solved: float
    difference: tuple[float, float, float] = Field(description="mean, low, high: 95 % by function")
    tokens: tuple[float, float] = Field(description="per attempt, before and after")
    first_edit_solved: tuple[float, float]


def read_committed() -> list[CommittedControls]:
    """All rows of the file."""
    return [CommittedControls.model_validate(row) for row in json.loads(_FILE.read_bytes())]


def committed_rows(recipe: str) -> list[ReportRow]:
    """Report rows of a recipe's seeds. None where nothing was committed for it."""
    return [_row(found) for found in read_committed() if found.recipe == recipe]


def _row(found: CommittedControls) -> ReportRow:
    mean, low, high = (100 * value for value in found.difference)
    before, after = found.tokens
    first_before, first_after = found.first_edit_solved
    return ReportRow(
        "RL",
        f"held-out mutations, committed: seed {found.seed} over its start",
        f"{found.start_solved:.1%}",
        f"{found.trained_solved:.1%}",
        f"{mean:+.1f} [{low:+.1f}, {high:+.1f}] points, 95 % by function, {before:.0f} and {after:.0f} tokens, "
        f"first edit {first_before:.1%} and {first_after:.1%}; {found.commit}, {found.date}",
    )
