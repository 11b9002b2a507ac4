"""Scorecards of checkpoints that nobody measured."""

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
