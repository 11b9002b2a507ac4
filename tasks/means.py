"""The mean that every stage takes."""

from collections.abc import Iterable


def mean(values: Iterable[float]) -> float:
    """Mean of the values, 0 of none."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
