"""Sampler: the attempts of a group have temperatures from two thirds of the recipe's to all of it."""

from ostinato.tasks.records import Problem


def ladder(problem: Problem, attempt: int, group_size: int, temperature: float) -> float:
    """Temperature of one attempt: the first of its group is the most careful."""
    return temperature * (2 + attempt / (group_size - 1)) / 3
