"""Scorecards of checkpoints that nobody measured."""

from ostinato.flows.reporting.evaluations import UNKNOWN, EvaluationReport
from ostinato.tasks.records import Metric, Scorecard


def flat_scorecard(checkpoint: str, figure: Metric, scorecard_id: str = "card") -> Scorecard:
    """One whose every measure is the same figure."""
    return Scorecard(
        scorecard_id=scorecard_id,
        suite="held_out",
        checkpoint=checkpoint,
        attempts_per_problem=4,
        temperature=1.0,
        average=figure,
        best_of=figure,
        generated_tokens=figure,
        turns=figure,
        tool_calls=figure,
        broken_call_ratio=0.0,
        problems=(),
    )


def report_of(*cards: Scorecard, in_training_text: tuple[str, ...] = ()) -> EvaluationReport:
    """Report of an evaluation of the first card's checkpoint."""
    return EvaluationReport(
        checkpoint=cards[0].checkpoint,
        against=None,
        suite="held_out",
        commit="",
        recipe="mine",
        seed=0,
        scorecards=cards,
        in_training_text=in_training_text or (UNKNOWN,) * len(cards),
        decision=None,
    )
