"""Boxes of a fleet from the order to start them to their confirmed end, with the orders to nodes."""

import itertools
from collections import deque

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.fleet.records import (
    NodeReport,
    Order,
    StartBox,
    StopBox,
    Template,
)
from ostinato.infra.sandbox.fleet.view import BoxPhase, BoxState, ClusterView, NodeState

_STOP_REPEAT_SECONDS = 5.0  # a box still seen so long after its stop is told again


class BoxLifecycle:
    """Starts and stops boxes of a view by orders, which a caller collects."""

    def __init__(self, view: ClusterView, start_seconds: float) -> None:
        self._view = view
        self._start_seconds = start_seconds
        self._numbers = itertools.count(1)
        self._orders: list[Order] = []
        self._due: deque[tuple[float, str]] = deque()  # boxes that start, since when

    def take_orders(self) -> list[Order]:
        """Orders since the last call, to be given to their nodes in this order."""
        orders, self._orders = self._orders, []
        return orders

    def start(
        self, node: NodeState, template: Template, now_seconds: float, request_id: str | None
    ) -> BoxState:
        """Order a box, for a request or (None) for whoever comes."""
        node_id = node.spec.node_id
        if not node.bucket.take(now_seconds):
            raise SandboxError(f"node {node_id} has no start token; wanted one")
        box_id = f"box-{next(self._numbers)}"
        box = BoxState(box_id, node, template, BoxPhase.STARTING, now_seconds, request_id)
        self._view.add(box)
        self._due.append((now_seconds, box_id))
        self._orders.append(StartBox(box_id=box_id, node_id=node_id, template=template.name))
        return box

    def stop(self, box: BoxState, now_seconds: float) -> None:
        """Order a box's end. It counts against its node until that is confirmed."""
        self._view.set_phase(box, BoxPhase.STOPPING, now_seconds)
        self._orders.append(StopBox(box_id=box.box_id, node_id=box.node.spec.node_id))

    def stop_late_starts(self, now_seconds: float) -> list[BoxState]:
        """Order the end of boxes that were not up in time. Returns them."""
        late = []
        while self._due and self._due[0][0] < now_seconds - self._start_seconds:
            box = self._view.boxes.get(self._due.popleft()[1])
            if box is not None and box.phase is BoxPhase.STARTING:
                self.stop(box, now_seconds)
                late.append(box)
        return late

    def reconcile(self, report: NodeReport, now_seconds: float) -> list[BoxState]:
        """Mend what a node's count of its boxes shows. Returns boxes that vanished.

        Orders and answers may be lost, repeated or late. What the node has is the truth, save for
        what changed after the count was asked for, and for starts, which have a deadline.
        """
        vanished: list[BoxState] = []
        known = self._view.nodes[report.node_id].boxes
        for box_id in sorted(report.boxes - known.keys()):
            self._orders.append(StopBox(box_id=box_id, node_id=report.node_id))
        for box in list(known.values()):
            age_seconds = report.counted_at_seconds - box.phase_since_seconds
            is_stopping = box.phase is BoxPhase.STOPPING
            if box.phase is BoxPhase.STARTING or age_seconds < 0:
                continue
            if box.box_id not in report.boxes:
                self._view.remove(box.box_id)
                vanished += [] if is_stopping else [box]
            elif is_stopping and age_seconds >= _STOP_REPEAT_SECONDS:
                self.stop(box, now_seconds)
        return vanished
