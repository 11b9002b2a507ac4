"""Report of an evaluation: on the console, as artifacts, and as the two files that CI reads."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from ostinato.flows.reporting.figures import interval, rounded, share
from ostinato.flows.reporting.gate_picture import show_gate
from ostinato.flows.reporting.overlap_notes import UNKNOWN
from ostinato.flows.stages.artifacts import show_markdown, show_table
from ostinato.flows.stages.console import say
from ostinato.infra.platform.record import Record
from ostinato.tasks.records import AttemptMeans, GateDecision, Scorecard

SCORECARD_JSON, SCORECARD_MARKDOWN = "scorecard.json", "scorecard.md"


class EvaluationReport(Record):
    """An evaluation with the gate's decision, as CI reads it. An outside baseline has none."""

    checkpoint: str
    against: str | None = Field(description="None: held against the floor of the gate")
    suite: str
    commit: str
    recipe: str
    seed: int
    scorecards: tuple[Scorecard, ...]
    in_training_text: tuple[str, ...] = Field(
        default=(), description="by scorecard: what of its problems the model's stages train on"
    )
    decision: GateDecision | None


def show_evaluation(
    report: EvaluationReport, directory: Path | None, held_against: Scorecard | None
) -> None:
    """Scorecards and the gate's decision: on the console, as artifacts and, if asked, as two files.
    `held_against`: what the gate compared with.
    """
    text = evaluation_as_markdown(report)
    rows = _rows(report)
    show_table(rows, key="scorecards", description=report.checkpoint)
    for card in report.scorecards:
        say(f"{card.checkpoint}, {card.suite}: solve rate {interval(card.average)}")
    if report.decision is not None:
        say(f"held against {_opponent(report, held_against)}")
        say(f"gate {_word(report.decision)}: {report.decision.reason}")
        cards = (report.scorecards[0], *(() if held_against is None else (held_against,)))
        rates = {f"{card.checkpoint}\n{card.suite}": card.average for card in cards}
        show_gate(rates, f"Gate {_word(report.decision)}: {report.decision.reason}")
    show_markdown(text, key="gate", description=report.checkpoint)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / SCORECARD_JSON).write_text(report.model_dump_json(indent=1))
        (directory / SCORECARD_MARKDOWN).write_text(text)


def evaluation_as_markdown(report: EvaluationReport) -> str:
    """An evaluation as a comment on a pull request."""
    rows = _rows(report)
    facts = {
        "against": report.against or "the floor",
        "commit": report.commit,
        "recipe": f"{report.recipe}, seed {report.seed}",
    }
    decision = report.decision
    title = "Outside baseline" if decision is None else f"Gate {_word(decision)}"
    lines = [
        f"## {title}: `{report.checkpoint}`",
        "",
        *([] if decision is None else [decision.reason, ""]),
        *_markdown_table(rows),
        *_markdown_table(attempt_rows(report)),
        "; ".join(f"{name} {value}" for name, value in facts.items() if value),
    ]
    return "\n".join(lines) + "\n"


def show_attempts(report: Mapping[str, Any], console: Console) -> None:
    """Prints the means of attempts. `report`: an EvaluationReport as JSON."""
    rows = attempt_rows(EvaluationReport.model_validate(report))
    if not rows:
        return
    table = Table(*rows[0], title="means of attempts")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def attempt_rows(report: EvaluationReport) -> list[dict[str, str]]:
    """What attempts took, those that solved also apart. None for scorecards older than the figures."""
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


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    if not rows:
        return []
    return [
        f"| {' | '.join(rows[0])} |",
        "| --- |" + " ---: |" * (len(rows[0]) - 1),
        *(f"| {' | '.join(row.values())} |" for row in rows),
        "",
    ]


def _opponent(report: EvaluationReport, held_against: Scorecard | None) -> str:
    if held_against is None:
        return "the floor of the gate: no checkpoint serves users"
    return f"{report.against}: solve rate {interval(held_against.average)}"


def _word(decision: GateDecision) -> str:
    return "passed" if decision.passed else "failed"


def _rows(report: EvaluationReport) -> list[dict[str, str]]:
    notes = itertools.chain(report.in_training_text, itertools.repeat(UNKNOWN))
    return [_row(card, note) for card, note in zip(report.scorecards, notes, strict=False)]


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
