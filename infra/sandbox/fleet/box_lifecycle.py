"""Boxes of a fleet from the order to start them to their confirmed end, with the orders to nodes."""

import itertools
from collections import deque

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.fleet.cluster_view import BoxPhase, BoxState, ClusterView, NodeState
from ostinato.infra.sandbox.fleet.reconciliation import compare
from ostinato.infra.sandbox.fleet.records import (
    NodeReport,
    Order,
    StartBox,
    StopBox,
    StopReason,
    Template,
)


class BoxLifecycle:
    """Starts and stops boxes of a view by orders, which a caller collects."""

    def __init__(
        self, view: ClusterView, *, start_seconds: float, stop_repeat_seconds: float
    ) -> None:
        self._view = view
        self._start_seconds = start_seconds
        self._stop_repeat_seconds = stop_repeat_seconds
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
        if not node.bucket.take(now_seconds):
            raise SandboxError(f"node {node.spec.node_id} has no start token; wanted one")
        box = BoxState(
            box_id=f"box-{next(self._numbers)}",
            node_id=node.spec.node_id,
            template=template,
            phase=BoxPhase.STARTING,
            phase_since_seconds=now_seconds,
            request_id=request_id,
        )
        self._view.add(box)
        self._due.append((now_seconds, box.box_id))
        self._orders.append(
            StartBox(box_id=box.box_id, node_id=box.node_id, template=template.name)
        )
        return box

    def stop(self, box: BoxState, reason: StopReason, now_seconds: float) -> None:
        """Order a box's end. It counts against its node until that is confirmed."""
        self._view.set_phase(box, BoxPhase.STOPPING, now_seconds)
        self._orders.append(StopBox(box_id=box.box_id, node_id=box.node_id, reason=reason))

    def stop_late_starts(self, now_seconds: float) -> list[BoxState]:
        """Order the end of boxes that were not up in time. Returns them."""
        late = []
        while self._due and self._due[0][0] < now_seconds - self._start_seconds:
            box = self._view.boxes.get(self._due.popleft()[1])
            if box is not None and box.phase is BoxPhase.STARTING:
                self.stop(box, StopReason.START_TIMEOUT, now_seconds)
                late.append(box)
        return late

    def reconcile(self, report: NodeReport, now_seconds: float) -> list[BoxState]:
        """Mend what a node's count of its boxes shows. Returns boxes that vanished."""
        node = self._view.nodes[report.node_id]
        differences = compare(
            [self._view.boxes[box_id] for box_id in node.boxes],
            report.boxes,
            counted_at_seconds=report.counted_at_seconds,
            stop_repeat_seconds=self._stop_repeat_seconds,
        )
        for box in (*differences.vanished, *differences.ended):
            self._view.remove(box.box_id)
        for box in differences.lingering:
            self.stop(box, StopReason.STRAY, now_seconds)
        for box_id in differences.strays:
            self._orders.append(
                StopBox(box_id=box_id, node_id=report.node_id, reason=StopReason.STRAY)
            )
        return differences.vanished
