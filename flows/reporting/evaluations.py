"""Reports of evaluations for people and CI: scorecards, the gate's decision, controls, overlap with training text."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure
from pydantic import Field
from rich.console import Console

from ostinato.flows.reporting.suite_report import (
    SuiteFigures,
    difference_rows,
    pareto_png,
    slice_rows,
)
from ostinato.flows.reporting.tables import (
    NOT_MEASURED,
    ReportRow,
    interval,
    markdown_table,
    print_table,
    rounded,
    share,
)
from ostinato.flows.stages.artifacts import optional, show_image, show_markdown, show_table
from ostinato.flows.stages.chain import ROWS_FILE, overlap_of
from ostinato.flows.stages.console import say
from ostinato.flows.stages.curves import figure_png
from ostinato.flows.stages.declared import SCORECARD_JSON
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import GradingError
from ostinato.infra.platform.record import Record
from ostinato.tasks.corpus.config import AnswerOverlap, CorpusResult
from ostinato.tasks.evaluation.controls import Control, ControlReport, compare_with_controls
from ostinato.tasks.evaluation.statistics import AttemptRow
from ostinato.tasks.records import AttemptMeans, GateDecision, Metric, Scorecard, Split

logger = logging.getLogger(__name__)

SCORECARD_MARKDOWN = "scorecard.md"
PARETO_PICTURE = "score-against-cost.png"
_JOINS = "The line joins the models that no cheaper one equals."
UNKNOWN = "not known"  # overlap for other people's models, and for corpora made from other problems
_GATE_KEY = "gate-solve-rates"
_GATE_EXPECTED = (
    "The candidate's interval is level with or above that of the checkpoint it is compared with; narrow intervals "
    "make the decision reliable."
)


class EvaluationReport(Record):
    """An evaluation with the gate's decision, as CI reads it. An outside baseline has no decision."""

    checkpoint: str
    against: str | None = Field(description="None: compared with the floor of the gate")
    suite: str
    commit: str
    recipe: str
    seed: int
    scorecards: tuple[Scorecard, ...]
    in_training_text: tuple[str, ...] = Field(
        description="overlap of each scorecard's problems with the model's training text"
    )
    decision: GateDecision | None
    figures: SuiteFigures | None = Field(default=None, description="None: the problems are splits")


def show_evaluation(
    report: EvaluationReport, directory: Path | None, held_against: Scorecard | None
) -> None:
    """Shows scorecards and the gate's decision on the console, as artifacts and, with `directory`, as files.
    `held_against`: scorecard that the gate compared with.
    """
    text = evaluation_as_markdown(report)
    rows = _rows(report)
    show_table(rows, key="scorecards", description=report.checkpoint)
    for card in report.scorecards:
        say(f"{card.checkpoint}, {card.suite}: solve rate {interval(card.average)}")
    if report.decision is not None:
        say(f"compared with {_opponent(report, held_against)}")
        say(f"gate {_outcome(report.decision)}: {report.decision.reason}")
        cards = (report.scorecards[0], *(() if held_against is None else (held_against,)))
        rates = {f"{card.checkpoint}\n{card.suite}": card.average for card in cards}
        show_gate(rates, f"Gate {_outcome(report.decision)}: {report.decision.reason}")
    show_markdown(text, key="gate", description=report.checkpoint)
    png = None if report.figures is None else pareto_png(report.figures)
    if png is not None:
        show_image(png, key="score-against-cost", description=_JOINS)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        if png is not None:
            (directory / PARETO_PICTURE).write_bytes(png)
        (directory / SCORECARD_JSON).write_text(report.model_dump_json(indent=1))
        (directory / SCORECARD_MARKDOWN).write_text(text)


def evaluation_as_markdown(report: EvaluationReport) -> str:
    """An evaluation as Markdown, for a comment on a pull request."""
    rows = _rows(report)
    facts = {
        "against": report.against or "the floor",
        "commit": report.commit,
        "recipe": f"{report.recipe}, seed {report.seed}",
    }
    decision = report.decision
    title = "Outside baseline" if decision is None else f"Gate {_outcome(decision)}"
    lines = [
        f"## {title}: `{report.checkpoint}`",
        "",
        *([] if decision is None else [decision.reason, ""]),
        *markdown_table(rows),
        *markdown_table(attempt_rows(report)),
        *markdown_table(slice_rows(report.scorecards, report.figures)),
        *markdown_table(difference_rows(report.figures)),
        "; ".join(f"{name} {value}" for name, value in facts.items() if value),
    ]
    return "\n".join(lines) + "\n"


def show_attempts(report: EvaluationReport, console: Console) -> None:
    """Prints the means of attempts, and the slices of a suite."""
    tables = {
        "means of attempts": attempt_rows(report),
        "slices": slice_rows(report.scorecards, report.figures),
        "first model minus second": difference_rows(report.figures),
    }
    for title, rows in tables.items():
        if rows:
            print_table(console, rows, title)


def attempt_rows(report: EvaluationReport) -> list[dict[str, str]]:
    """Means over the attempts of each scorecard, and over the solved attempts where these differ."""
    rows = []
    for card in report.scorecards:
        every, solved = card.attempt_means, card.solved_attempt_means
        named = {"all": every, "solved": None if solved == every else solved}
        rows += [_attempt_row(card, name, means) for name, means in named.items() if means]
    return rows


def _attempt_row(card: Scorecard, name: str, means: AttemptMeans) -> dict[str, str]:
    return {
        "model": card.checkpoint,
        "suite": card.suite,
        "attempts": f"{name} {means.attempts}",
        "seconds": rounded(means.seconds),
        "generated tokens": rounded(means.generated_tokens),
        "prompt tokens": rounded(means.prompt_tokens),
        "tool calls": rounded(means.tool_calls),
        "lines changed": rounded(means.changed_lines),
        "lines of the reference": rounded(means.reference_lines),
    }


def _opponent(report: EvaluationReport, held_against: Scorecard | None) -> str:
    if held_against is None:
        return "the floor of the gate: no checkpoint serves users"
    return f"{report.against}: solve rate {interval(held_against.average)}"


def _outcome(decision: GateDecision) -> str:
    return "passed" if decision.passed else "failed"


def _rows(report: EvaluationReport) -> list[dict[str, str]]:
    noted = zip(report.scorecards, report.in_training_text, strict=True)
    return [_row(card, note) for card, note in noted]


def _row(card: Scorecard, in_training_text: str) -> dict[str, str]:
    return {
        "model": card.checkpoint,
        "suite": card.suite,
        "problems": str(len(card.problems)),
        "average": interval(card.average),
        f"best of {card.attempts_per_problem}": interval(card.best_of),
        "tokens": f"{card.generated_tokens.mean:.1f}",
        "turns": f"{card.turns.mean:.2f}",
        "tool calls": f"{card.tool_calls.mean:.2f}",
        "broken calls": f"{card.broken_call_ratio:.1%}",
        "first edit": share(card.first_edit_ratio),
        "limit or repeat": share(card.cut_ratio),
        "in training text": in_training_text,
    }


def show_gate(rates: Mapping[str, Metric], decided: str) -> None:
    """Shows the solve rates that a gate judged as a picture in Prefect, with its decision."""
    with optional(_GATE_KEY):
        show_image(gate_png(rates), key=_GATE_KEY, description=f"{decided}. {_GATE_EXPECTED}")


def gate_png(rates: Mapping[str, Metric]) -> bytes:
    """A plot of each name's mean and interval, the first name on top."""
    figure = Figure(figsize=(6.4, 1.2 + 0.45 * len(rates)), dpi=110)
    axes = figure.subplots()
    for place, metric in enumerate(rates.values()):
        axes.plot((metric.low, metric.high), (place, place), color="tab:blue", linewidth=1.4)
        axes.plot(metric.mean, place, "o", color="tab:blue")
    axes.set_yticks(range(len(rates)), list(rates), fontsize=8)
    axes.set_ylim(len(rates) - 0.5, -0.5)
    axes.set_xlabel("solve rate with its interval")
    axes.grid(alpha=0.3)
    return figure_png(figure)


def note_overlap(
    context: StageContext, checkpoint: ArtifactRef, problems: ArtifactRef, split: Split | None
) -> str:
    """Overlap of problems with those of the checkpoint's ancestor corpora that were built from these problems."""
    found = overlap_of(context, checkpoint, problems, split)
    return "; ".join(describe_overlap(item) for item in found.corpora.values()) or UNKNOWN


def describe_overlap(found: AnswerOverlap) -> str:
    """Number of problems with a right line in the text, and per stage the number with an n-gram of a right line."""
    lines = f"right lines of {found.problems_with_answer} of {found.problems}"
    if not found.ngrams:
        return lines
    counts = ", ".join(f"{item.stage} {item.problems_with_answer}" for item in found.ngrams)
    first = found.ngrams[0]
    return f"{lines}; their {first.words}-grams: {counts} of {first.problems}"


def overlap_rows(result: CorpusResult) -> Iterator[dict[str, object]]:
    """A row per split and stage, and one per split for whole lines."""
    for found in result.overlap:
        yield {
            "split": found.split.value,
            "trained on": "all documents",
            "measured by": "right lines",
            "problems": found.problems,
            "with answer": found.problems_with_answer,
            "with any": "",
            "median": f"{found.median_documents:g} documents",
        }
        for item in found.ngrams:
            yield {
                "split": found.split.value,
                "trained on": item.stage,
                "measured by": f"{item.words}-grams",
                "problems": item.problems,
                "with answer": item.problems_with_answer,
                "with any": item.problems_with_text,
                "median": f"{item.median_share:.0%} of a problem's",
            }


def read_rows(context: StageContext, evaluation: ArtifactRef) -> list[AttemptRow]:
    """Rows of an evaluation, one per attempt."""
    text = (context.directory_of(evaluation) / ROWS_FILE).read_text()
    return [AttemptRow.model_validate_json(line) for line in text.splitlines()]


def show_controls(report: ControlReport) -> None:
    """Shows a trained checkpoint and its controls at equal tokens, on the console and as an artifact."""
    rows = []
    for control in (report.trained, *report.controls):
        calls = control.tool_calls
        rows.append(
            {
                "policy": _name(control),
                "solved": f"{control.solved:.1%}",
                "first edit": share(control.first_edit_solved),
                "tokens": f"{control.generated_tokens:.0f}",
                "tool calls": NOT_MEASURED if calls is None else f"{calls:.2f}",
                "limit or repeat": share(control.cut_ratio),
                "trained minus this": _points(control),
            }
        )
    verdict = f"is {'above' if report.gain_counts else 'not above'} all controls at equal tokens"
    for row in rows:
        say(", ".join(f"{name} {value}" for name, value in row.items() if value))
    say(f"differences in points, 95 % by function: the trained model {verdict}")
    show_table(rows, key="controls", description=f"95 % by function; the trained model {verdict}")


def control_rows(
    context: StageContext, start: ArtifactRef, trained: ArtifactRef
) -> list[ReportRow]:
    """Rows that compare the checkpoint after RL with its start: as it is, started over, and at best of n. Empty when
    the two evaluations had different problems, and the report then has no controls.
    """
    try:
        report = compare_with_controls(read_rows(context, start), read_rows(context, trained))
    except GradingError as error:
        logger.warning("the report has no controls: %s", error)
        return []
    verdict = "above" if report.gain_counts else "not above"
    return [
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


def _conduct(control: Control, trained: Control) -> str:
    """Tokens, first edits and tool calls per attempt, the control's values first. Only tokens when the control
    makes several attempts.
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
