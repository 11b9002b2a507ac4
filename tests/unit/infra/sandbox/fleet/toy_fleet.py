"""A fleet in memory that obeys orders late, in part, or not at all: what the scheduler's laws are
checked on.
"""

import random
from dataclasses import dataclass, field

from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    FleetPolicy,
    Granted,
    LeaseEnded,
    NodeReport,
    NodeSpec,
    Notice,
    Order,
    Pressure,
    Refused,
    Resources,
    StartBox,
    StopBox,
    Template,
)
from ostinato.infra.sandbox.fleet.scheduler import FleetScheduler
from ostinato.infra.sandbox.fleet.view import BoxPhase

GIB = 1 << 30
CALM = Pressure(used=Resources(cpus=0, memory_bytes=0, disk_bytes=0))
SMALL = Template(
    name="small",
    declared=Resources(cpus=1, memory_bytes=GIB, disk_bytes=GIB),
    warm_maximum=3,
)
LARGE = Template(name="large", declared=Resources(cpus=2, memory_bytes=3 * GIB, disk_bytes=GIB))


def node_spec(name: str, **changes: object) -> NodeSpec:
    fields = {
        "node_id": name,
        "capacity": Resources(cpus=4, memory_bytes=8 * GIB, disk_bytes=64 * GIB),
        "starts_per_second": 4.0,
        "start_burst": 3,
        "cpu_overcommit_ratio": 2.0,
    }
    return NodeSpec.model_validate(fields | changes)


@dataclass
class ToyFleet:
    """Nodes as sets of boxes, the scheduler, and everything that was said."""

    scheduler: FleetScheduler
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0
    boxes: dict[str, set[str]] = field(default_factory=dict)  # node -> boxes that really run
    undelivered: list[Order] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    starts: list[tuple[float, str]] = field(default_factory=list)  # time, node
    notices: list[Notice] = field(default_factory=list)
    num_requests: int = 0

    @classmethod
    def of(cls, num_nodes: int, policy: FleetPolicy | None = None, **changes: object) -> "ToyFleet":
        fleet = cls(FleetScheduler([SMALL, LARGE], policy))
        for number in range(num_nodes):
            fleet.join(f"node-{number}", **changes)
        return fleet

    def join(self, node_id: str, **changes: object) -> None:
        self.boxes.setdefault(node_id, set())
        self.scheduler.join(node_spec(node_id, **changes), self.now)
        self.collect()

    def ask(self, template: str = "small", **changes: object) -> str:
        self.num_requests += 1
        fields = {
            "request_id": f"request-{self.num_requests}",
            "template": template,
        }
        request = BoxRequest.model_validate(fields | changes)
        self.scheduler.ask(request, self.now)
        self.collect()
        return request.request_id

    def collect(self) -> None:
        for order in self.scheduler.take_orders():
            self.orders.append(order)
            self.undelivered.append(order)
            if isinstance(order, StartBox):
                self.starts.append((self.now, order.node_id))
        self.notices += self.scheduler.take_notices()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.scheduler.tick(self.now, self.rng)
        self.collect()

    def deliver(self, *, share: float = 1.0, drop: float = 0.0, fail: float = 0.0) -> None:
        """Hand over orders; some stay under way, some are lost, some starts fail."""
        kept = []
        for order in self.undelivered:
            if self.rng.random() >= share:
                kept.append(order)
            elif self.rng.random() >= drop and order.node_id in self.boxes:
                self.obey(order, fails=self.rng.random() < fail)
        self.undelivered = kept
        self.collect()

    def obey(self, order: Order, *, fails: bool = False) -> None:
        here = self.boxes[order.node_id]
        if isinstance(order, StopBox):
            here.discard(order.box_id)
            self.scheduler.box_stopped(order.box_id)
        elif fails:
            self.scheduler.box_failed(order.box_id)
        else:
            here.add(order.box_id)
            self.scheduler.box_up(order.box_id, self.now)

    def heartbeat(self, pressure: Pressure = CALM) -> None:
        for node_id, boxes in self.boxes.items():
            report = NodeReport(
                node_id=node_id,
                pressure=pressure,
                boxes=frozenset(boxes),
                counted_at_seconds=self.now,
            )
            if not self.scheduler.report(report, self.now):
                self.join(node_id)
        self.collect()

    def settle(self, seconds: float = 60.0) -> None:
        """Let calm time pass: everything is delivered and every node heard."""
        for _ in range(int(seconds)):
            self.tick(1.0)
            self.deliver()
            self.heartbeat()
            self.deliver()

    def granted(self) -> list[str]:
        return [notice.request_id for notice in self.notices if isinstance(notice, Granted)]

    def refused(self) -> list[str]:
        return [notice.request_id for notice in self.notices if isinstance(notice, Refused)]

    def ended(self, *, expired: bool) -> list[str]:
        return [
            notice.request_id
            for notice in self.notices
            if isinstance(notice, LeaseEnded) and notice.was_expired is expired
        ]

    def check_limits(self) -> None:
        """Declared sums of boxes that count stay within the limit, and the sums are right."""
        view = self.scheduler.view
        for node in view.nodes.values():
            boxes = list(node.boxes.values())
            assert all(view.boxes[box.box_id] is box and box.node is node for box in boxes)
            memory = sum(box.template.declared.memory_bytes for box in boxes)
            cpus = sum(box.template.declared.cpus for box in boxes)
            assert memory == node.promised.memory_bytes <= node.limit.memory_bytes
            assert abs(cpus - node.promised.cpus) < 1e-6
            assert cpus <= node.limit.cpus + 1e-6
        for template in self.scheduler.templates:
            warm = [
                box.box_id
                for box in view.boxes.values()
                if box.phase is BoxPhase.WARM and box.template.name == template
            ]
            assert sorted(warm) == sorted(box.box_id for box in view.warm(template))

    def check_leases(self) -> None:
        """A live lease has one box, or its request waits or starts; a box has one lease."""
        scheduler = self.scheduler
        served = {}
        for box in scheduler.view.boxes.values():
            if box.phase is BoxPhase.LEASED:
                assert box.request_id is not None
                assert box.request_id in scheduler.leases
                assert box.request_id not in served
                served[box.request_id] = box
            elif box.phase is not BoxPhase.STARTING:
                assert box.request_id is None
        starting = {
            box.request_id
            for box in scheduler.view.boxes.values()
            if box.phase is BoxPhase.STARTING and box.request_id is not None
        }
        for request_id in scheduler.leases:
            places = [
                request_id in served,
                request_id in starting,
                request_id in scheduler.queue,
            ]
            assert places.count(True) == 1, (request_id, places)
