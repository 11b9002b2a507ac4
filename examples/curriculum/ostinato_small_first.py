"""Curriculum: problems whose function is small are drawn first, and those that every attempt solves seldom again."""

from ostinato.tasks.records import Problem
from ostinato.tasks.rollout.curriculum import ProblemStatistics


def small_first(problem: Problem, results: ProblemStatistics, group_size: int) -> float:
    """Weight of a problem in the next draw: falls with the square of its function's lines."""
    lines = problem.last_line - problem.first_line + 1
    is_easy = results.attempts > 0 and results.solved == results.attempts
    return (0.1 if is_easy else 1.0) / lines**2
