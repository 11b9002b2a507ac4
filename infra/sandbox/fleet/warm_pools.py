"""Warm boxes of a fleet: how many of a template are kept, started and ended."""

import math
import random
from collections.abc import Iterable

from ostinato.infra.sandbox.fleet.box_lifecycle import BoxLifecycle
from ostinato.infra.sandbox.fleet.cluster_view import ClusterView, NodeState
from ostinato.infra.sandbox.fleet.placement import choose_start_node
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.records import Priority, StopReason, Template

_MARGIN_RATIO = 2.0  # arrivals are bursty: keep what comes in during two starts
_START_SMOOTHING = 0.1
_STOPS_AT_ONCE = 8


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
        # with this weight a steady stream of r per second settles at r
        self._per_second += math.log(2) / self._half_life_seconds

    def note_start(self, duration_seconds: float) -> None:
        """A box took so long to start."""
        if self.start_seconds == 0.0:
            self.start_seconds = duration_seconds
        else:
            self.start_seconds += _START_SMOOTHING * (duration_seconds - self.start_seconds)

    def per_second(self, now_seconds: float) -> float:
        """Requests per second, recent ones counting more."""
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
    return min(expected, template.warm_maximum)


class WarmPools:
    """Boxes that are up and serve nobody yet."""

    def __init__(self, view: ClusterView, boxes: BoxLifecycle, policy: FleetPolicy) -> None:
        self._view = view
        self._boxes = boxes
        self._policy = policy
        self._meters: dict[str, DemandMeter] = {}
        self._kept_at_seconds = float("-inf")
        self._made_room_at_seconds = float("-inf")

    def count_request(self, template: Template, now_seconds: float) -> None:
        """A request for a template came in."""
        meter = self._meters.get(template.name)
        if meter is None:
            meter = DemandMeter(self._policy.demand_half_life_seconds, now_seconds)
            self._meters[template.name] = meter
        meter.count(now_seconds)

    def note_start(self, template: Template, duration_seconds: float) -> None:
        """A box of a template took so long to start."""
        meter = self._meters.get(template.name)
        if meter is not None:
            meter.note_start(duration_seconds)

    def has_too_many(self, template: Template, now_seconds: float) -> bool:
        """Whether more boxes are idle than are wanted."""
        return self._view.num_idle(template) > self._num_wanted(template, now_seconds)

    def make_room(self, nodes: list[NodeState], now_seconds: float) -> None:
        """End a few boxes where a request finds no room, at the policy's pace."""
        if now_seconds - self._made_room_at_seconds < self._policy.warm_interval_seconds:
            return
        self._made_room_at_seconds = now_seconds
        warm = [box_id for node in nodes for kind in node.warm.values() for box_id in kind]
        for box_id in warm[:_STOPS_AT_ONCE]:
            self._boxes.stop(self._view.boxes[box_id], StopReason.SURPLUS, now_seconds)

    def tick(self, templates: Iterable[Template], now_seconds: float, rng: random.Random) -> None:
        """Start or end boxes at the policy's pace. Not while a request waits."""
        if now_seconds - self._kept_at_seconds < self._policy.warm_interval_seconds:
            return
        self._kept_at_seconds = now_seconds
        for template in templates:
            if template.warm_maximum > 0:
                self._keep(template, now_seconds, rng)

    def _keep(self, template: Template, now_seconds: float, rng: random.Random) -> None:
        nodes = list(self._view.nodes.values())
        wanted = self._num_wanted(template, now_seconds)
        for _ in range(wanted - self._view.num_idle(template)):
            node = choose_start_node(
                nodes,
                template,
                Priority.TRAINING,
                self._policy.placement,
                rng=rng,
                now_seconds=now_seconds,
            )
            if node is None:
                break
            self._boxes.start(node, template, now_seconds, None)
        surplus = self._view.num_idle(template) - wanted
        for node in nodes:
            for box_id in list(node.warm.get(template.name, {}))[: max(0, surplus)]:
                self._boxes.stop(self._view.boxes[box_id], StopReason.SURPLUS, now_seconds)
                surplus -= 1

    def _num_wanted(self, template: Template, now_seconds: float) -> int:
        return warm_boxes_wanted(template, self._meters.get(template.name), now_seconds)
