"""The checkpoint after RL beside the controls: what its start does as it is, started over and at best of n."""

import logging

from ostinato.flows.reporting.committed_controls import committed_rows
from ostinato.flows.reporting.figures import share
from ostinato.flows.stages.artifacts import show_table
from ostinato.flows.stages.console import say
from ostinato.flows.stages.curves.report import ReportRow
from ostinato.flows.stages.scorecards import ROWS_FILE
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import GradingError
from ostinato.tasks.evaluation.controls import Control, ControlReport, compare_with_controls
from ostinato.tasks.evaluation.statistics import AttemptRow

logger = logging.getLogger(__name__)


def read_rows(context: StageContext, evaluation: ArtifactRef) -> list[AttemptRow]:
    """A row per attempt of an evaluation."""
    text = (context.directory_of(evaluation) / ROWS_FILE).read_text()
    return [AttemptRow.model_validate_json(line) for line in text.splitlines()]


def control_rows(
    context: StageContext, start: ArtifactRef, trained: ArtifactRef
) -> list[ReportRow]:
    """Report rows from the two evaluations that a report has anyway, and those committed for the recipe below
    them. Nothing is run for them. None where the two had other problems, which is no reason to have no report.
    """
    try:
        report = compare_with_controls(read_rows(context, start), read_rows(context, trained))
    except GradingError as error:
        logger.warning("the report has no controls: %s", error)
        return []
    verdict = "above" if report.gain_counts else "not above"
    own = [
        ReportRow(
            "RL",
            f"held-out mutations, control: {_name(control)}",
            f"{control.solved:.1%}",
            f"{report.trained.solved:.1%}",
            f"{_points(control)} points, 95 % by function, {_conduct(control, report.trained)}; "
            f"RL is {verdict} all controls at equal tokens",
        )
        for control in report.controls
    ]
    return own + committed_rows(context.recipe.name)


def show_controls(report: ControlReport) -> None:
    """A trained checkpoint beside what its start does with as many tokens."""
    rows = []
    for control in (report.trained, *report.controls):
        calls = control.tool_calls
        rows.append(
            {
                "policy": _name(control),
                "solved": f"{control.solved:.1%}",
                "first edit": share(control.first_edit_solved),
                "tokens": f"{control.generated_tokens:.0f}",
                "tool calls": "not measured" if calls is None else f"{calls:.2f}",
                "limit or repeat": share(control.cut_ratio),
                "trained minus this": _points(control),
            }
        )
    verdict = f"is {'above' if report.gain_counts else 'not above'} all controls at equal tokens"
    for row in rows:
        say(", ".join(f"{name} {value}" for name, value in row.items() if value))
    say(f"differences in points, 95 % by function: the trained one {verdict}")
    show_table(rows, key="controls", description=f"95 % by function; the trained one {verdict}")


def _conduct(control: Control, trained: Control) -> str:
    """Tokens, first edits and tool calls per attempt, the control's first. Tokens alone where the control makes
    several attempts.
    """
    text = f"{control.generated_tokens:.0f} and {trained.generated_tokens:.0f} tokens"
    if control.tool_calls is None or trained.tool_calls is None:
        return text
    return (
        f"{text}, first edit {share(control.first_edit_solved)} and {share(trained.first_edit_solved)}, "
        f"tool calls {control.tool_calls:.2f} and {trained.tool_calls:.2f}, "
        f"limit or repeat {share(control.cut_ratio)} and {share(trained.cut_ratio)}"
    )


def _name(control: Control) -> str:
    return control.name if control.has_equal_tokens else f"{control.name} (fewer)"


def _points(control: Control) -> str:
    found = control.difference
    if found is None:
        return ""
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
