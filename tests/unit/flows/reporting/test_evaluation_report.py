"""An evaluation's tables: what attempts took, those that solved apart where that says something."""

import io
import json

import pytest
from rich.console import Console

from ostinato.flows.reporting.evaluations import (
    attempt_rows,
    evaluation_as_markdown,
    show_attempts,
)
from ostinato.tasks.evaluation.statistics import AttemptRow, scorecard_from
from ostinato.tasks.records import Scorecard
from tests.fakes.scorecards import report_of


def card_of(*solved: bool, changed: int | None = 2) -> Scorecard:
    rows = [
        AttemptRow(
            problem_id="p",
            attempt=number,
            solved=is_solved,
            generated_tokens=60,
            turns=3,
            tool_calls=4,
            broken_calls=0,
            seconds=1.0 if is_solved else 4.0,
            changed_lines=changed,
            reference_lines=1,
        )
        for number, is_solved in enumerate(solved)
    ]
    return scorecard_from(rows, suite="held_out", checkpoint="toy", temperature=1.0)


def test_means_of_attempts_stand_in_every_form_of_the_report() -> None:
    report, text = report_of(card_of(True, False, False)), io.StringIO()
    every, solved = attempt_rows(report)
    assert (every["attempts"], solved["attempts"]) == ("all 3", "solved 1")
    assert (every["seconds"], solved["seconds"]) == ("3.0", "1.0")
    assert (every["lines changed"], every["lines of the reference"]) == ("2.0", "1.0")
    assert every["prompt tokens"] == "not measured"
    assert f"| {' | '.join(solved.values())} |\n" in evaluation_as_markdown(report)

    as_json = json.loads(report.model_dump_json())
    assert as_json["scorecards"][0]["solved_attempt_means"]["seconds"] == 1.0
    show_attempts(report, Console(file=text, width=160))
    assert all(part in text.getvalue() for part in ("all 3", "solved 1", "lines changed"))


@pytest.mark.parametrize("solved", [True, False])
def test_attempts_that_all_ended_alike_have_one_row(solved: bool) -> None:
    assert len(attempt_rows(report_of(card_of(solved, solved)))) == 1


def test_what_attempts_took_is_no_part_of_a_scorecards_name() -> None:
    assert card_of(True).scorecard_id == card_of(True, changed=None).scorecard_id
