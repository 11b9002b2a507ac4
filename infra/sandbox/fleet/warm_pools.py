"""How many warm boxes of a template the fleet should keep.

It starts nothing.
"""

import math

from ostinato.infra.sandbox.fleet.records import Template

_MARGIN_RATIO = 2.0  # arrivals are bursty: keep what comes in during two starts
_START_SMOOTHING = 0.1


class DemandMeter:
    """Smoothed rate of requests and duration of starts of one template."""

    __slots__ = ("_half_life_seconds", "_per_second", "_seen_at_seconds", "start_seconds")

    def __init__(self, half_life_seconds: float, now_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._per_second = 0.0
        self._seen_at_seconds = now_seconds
        self.start_seconds = 0.0

    def count(self, now_seconds: float) -> None:
        """A request came in."""
        self._decay(now_seconds)
        # with this weight a steady stream of r a second settles at r
        self._per_second += math.log(2) / self._half_life_seconds

    def note_start(self, duration_seconds: float) -> None:
        """A box took so long to start."""
        if self.start_seconds == 0.0:
            self.start_seconds = duration_seconds
        else:
            self.start_seconds += _START_SMOOTHING * (duration_seconds - self.start_seconds)

    def per_second(self, now_seconds: float) -> float:
        """Requests a second, recent ones counting more."""
        self._decay(now_seconds)
        return self._per_second

    def _decay(self, now_seconds: float) -> None:
        passed_seconds = max(0.0, now_seconds - self._seen_at_seconds)
        self._per_second *= 0.5 ** (passed_seconds / self._half_life_seconds)
        self._seen_at_seconds = max(self._seen_at_seconds, now_seconds)


def warm_boxes_wanted(template: Template, meter: DemandMeter | None, now_seconds: float) -> int:
    """Enough to serve what arrives while a new one starts, within the template's bounds."""
    expected = 0
    if meter is not None:
        arriving = meter.per_second(now_seconds) * meter.start_seconds
        expected = math.ceil(arriving * _MARGIN_RATIO - 1e-9)
    return min(max(expected, template.warm_minimum), template.warm_maximum)
