"""A reward term: the lines that an attempt added. A negative weight prefers small changes."""

from ostinato.tasks.grading.change import JudgedAttempt


def measure_brevity(attempt: JudgedAttempt) -> float:
    """Added lines of a passed attempt, at most 50. 0 for an attempt that did not pass."""
    return min(len(attempt.change.added_lines), 50) if attempt.verdict.passed else 0.0
