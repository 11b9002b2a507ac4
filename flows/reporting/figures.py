"""Figures as tables show them."""

from ostinato.tasks.records import Metric


def share(ratio: float | None) -> str:
    """A part of a whole in percent. None: not measured."""
    return "not measured" if ratio is None else f"{ratio:.1%}"


def rounded(number: float | None) -> str:
    """A mean with one decimal. None: not measured."""
    return "not measured" if number is None else f"{number:.1f}"


def interval(metric: Metric) -> str:
    """A mean with its bounds, in percent."""
    return f"{metric.mean:.1%} [{metric.low:.1%}, {metric.high:.1%}]"
