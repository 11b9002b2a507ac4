"""Warm boxes of a fleet: how many of a template are kept, started and ended."""

import math
import random
from collections.abc import Iterable

from ostinato.infra.sandbox.fleet.box_lifecycle import BoxLifecycle
from ostinato.infra.sandbox.fleet.placement import choose_start_node
from ostinato.infra.sandbox.fleet.records import Template
from ostinato.infra.sandbox.fleet.view import BoxState, ClusterView

_MARGIN_RATIO = 2.0  # arrivals are bursty: keep what comes in during two starts
_START_SMOOTHING = 0.1
_STOPS_AT_ONCE = 8
_INTERVAL_SECONDS = 1.0


class DemandMeter:
    """Smoothed rate of requests and duration of starts of one template."""

    def __init__(self, half_life_seconds: float, now_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._per_second = 0.0
        self._seen_at_seconds = now_seconds
        self._start_seconds = 0.0

    def count(self, now_seconds: float) -> None:
        """A request came in."""
        # with this weight a steady stream of r per second settles at r
        self._per_second = self.per_second(now_seconds) + math.log(2) / self._half_life_seconds

    def note_start(self, duration_seconds: float) -> None:
        """A box took so long to start."""
        smoothing = _START_SMOOTHING if self._start_seconds else 1.0
        self._start_seconds += smoothing * (duration_seconds - self._start_seconds)

    def per_second(self, now_seconds: float) -> float:
        """Requests per second, recent ones counting more."""
        passed_seconds = max(0.0, now_seconds - self._seen_at_seconds)
        self._per_second *= 0.5 ** (passed_seconds / self._half_life_seconds)
        self._seen_at_seconds += passed_seconds
        return self._per_second

    def boxes_wanted(self, now_seconds: float) -> int:
        """Enough to serve what arrives while a new one starts."""
        arriving = self.per_second(now_seconds) * self._start_seconds
        return math.ceil(arriving * _MARGIN_RATIO - 1e-9)


class WarmPools:
    """Boxes that are up and serve nobody yet."""

    def __init__(
        self, view: ClusterView, boxes: BoxLifecycle, demand_half_life_seconds: float
    ) -> None:
        self._view = view
        self._boxes = boxes
        self._demand_half_life_seconds = demand_half_life_seconds
        self._meters: dict[str, DemandMeter] = {}
        self._kept_at_seconds = float("-inf")
        self._made_room_at_seconds = float("-inf")

    def count_request(self, template: Template, now_seconds: float) -> None:
        """A request for a template came in."""
        if template.name not in self._meters:
            meter = DemandMeter(self._demand_half_life_seconds, now_seconds)
            self._meters[template.name] = meter
        self._meters[template.name].count(now_seconds)

    def note_start(self, template: Template, duration_seconds: float) -> None:
        """A box of a template took so long to start."""
        if template.name in self._meters:
            self._meters[template.name].note_start(duration_seconds)

    def has_too_many(self, template: Template, now_seconds: float) -> bool:
        """Whether more boxes are idle than are wanted."""
        return self._view.num_idle(template) > self._num_wanted(template, now_seconds)

    def make_room(self, templates: Iterable[str], now_seconds: float) -> None:
        """End a few boxes where a request finds no room, at the policy's pace."""
        if now_seconds - self._made_room_at_seconds >= _INTERVAL_SECONDS:
            self._made_room_at_seconds = now_seconds
            warm = [box for template in templates for box in self._view.warm(template)]
            self._stop(warm[:_STOPS_AT_ONCE], now_seconds)

    def tick(self, templates: Iterable[Template], now_seconds: float, rng: random.Random) -> None:
        """Start or end boxes at the policy's pace. Not while a request waits."""
        if now_seconds - self._kept_at_seconds < _INTERVAL_SECONDS:
            return
        self._kept_at_seconds = now_seconds
        for template in templates:
            if template.warm_maximum > 0:
                self._keep(template, now_seconds, rng)

    def _keep(self, template: Template, now_seconds: float, rng: random.Random) -> None:
        missing = self._num_wanted(template, now_seconds) - self._view.num_idle(template)
        for _ in range(missing):
            nodes = list(self._view.nodes.values())
            node = choose_start_node(nodes, template, rng=rng, now_seconds=now_seconds)
            if node is None:
                break
            self._boxes.start(node, template, now_seconds, None)
        self._stop(self._view.warm(template.name)[: max(0, -missing)], now_seconds)

    def _stop(self, boxes: list[BoxState], now_seconds: float) -> None:
        for box in boxes:
            self._boxes.stop(box, now_seconds)

    def _num_wanted(self, template: Template, now_seconds: float) -> int:
        meter = self._meters.get(template.name)
        wanted = 0 if meter is None else meter.boxes_wanted(now_seconds)
        return min(wanted, template.warm_maximum)
