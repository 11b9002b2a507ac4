"""Laws of the scheduler under any order of events, lost messages and lost nodes included."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.infra.sandbox.fleet.records import FleetPolicy, Granted, StartBox
from tests.unit.infra.sandbox.fleet.toy_fleet import ToyFleet

POLICY = FleetPolicy(
    node_silence_seconds=5.0,
    start_seconds=8.0,
    demand_half_life_seconds=4.0,
)
BURST, PER_SECOND = 3, 4.0


class FleetMachine(RuleBasedStateMachine):
    """Any interleaving of requests, time, orders, failures and lost nodes."""

    @initialize(num_nodes=st.integers(1, 4), seed=st.integers(0, 1000))
    def build(self, num_nodes: int, seed: int) -> None:
        self.fleet = ToyFleet.of(num_nodes, POLICY, starts_per_second=PER_SECOND, start_burst=BURST)
        self.fleet.rng.seed(seed)
        self.requests: list[str] = []  # in the order of their asking
        self.again: set[str] = set()  # those that had a box, or a start, before
        self.given_back: set[str] = set()
        self.num_deaths = 0

    @rule(
        template=st.sampled_from(["small", "large"]),
        lease_seconds=st.sampled_from([3.0, 30.0]),
        amount=st.integers(1, 4),
    )
    def ask(self, template, lease_seconds, amount) -> None:
        for _ in range(amount):
            self.requests.append(
                self.fleet.ask(template, lease_seconds=lease_seconds, wait_seconds=20.0)
            )

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 3.0]))
    def tick(self, seconds: float) -> None:
        fleet = self.fleet
        before = len(fleet.orders), len(fleet.notices)
        fleet.tick(seconds)
        self.check_order(*before)

    def check_order(self, orders_before: int, notices_before: int) -> None:
        fleet = self.fleet
        boxes = fleet.scheduler.view.boxes
        served = [
            boxes[order.box_id].request_id
            for order in fleet.orders[orders_before:]
            if isinstance(order, StartBox) and order.box_id in boxes
        ] + [
            notice.request_id
            for notice in fleet.notices[notices_before:]
            if isinstance(notice, Granted)
        ]
        first = {request for request in served if request is not None} - self.again
        self.again |= first
        waiting = [name for name in self.requests if name in fleet.scheduler.queue]
        latest = max(map(self.requests.index, first), default=-1)
        assert all(self.requests.index(name) > latest for name in waiting if name not in self.again)

    @rule(share=st.sampled_from([0.5, 1.0]), drop=st.sampled_from([0.0, 0.2]))
    def deliver(self, share: float, drop: float) -> None:
        self.fleet.deliver(share=share, drop=drop, fail=drop)

    @rule()
    def heartbeat(self) -> None:
        self.fleet.heartbeat()

    @rule(number=st.integers(0, 50))
    def renew(self, number: int) -> None:
        live = list(self.fleet.scheduler.leases)
        if live:
            self.fleet.scheduler.renew(live[number % len(live)], self.fleet.now)

    @rule(number=st.integers(0, 50))
    def release(self, number: int) -> None:
        if self.requests:
            request_id = self.requests[number % len(self.requests)]
            self.given_back.add(request_id)
            self.fleet.scheduler.release(request_id, self.fleet.now)
            self.fleet.collect()

    @precondition(lambda self: len(self.fleet.boxes) > 1)
    @rule(number=st.integers(0, 3))
    def lose_node(self, number: int) -> None:
        """A node goes silent; its boxes are gone with it."""
        self.num_deaths += 1
        node_id = list(self.fleet.boxes)[number % len(self.fleet.boxes)]
        del self.fleet.boxes[node_id]

    @rule(number=st.integers(0, 50))
    def lose_box(self, number: int) -> None:
        """A box dies unnoticed."""
        for boxes in self.fleet.boxes.values():
            if boxes:
                boxes.discard(sorted(boxes)[number % len(boxes)])
                return

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        self.fleet.check_limits()

    @invariant()
    def every_lease_has_its_place(self) -> None:
        self.fleet.check_leases()

    @invariant()
    def starts_are_bounded(self) -> None:
        by_node: dict[str, list[float]] = {}
        for at, node_id in self.fleet.starts:
            by_node.setdefault(node_id, []).append(at)
        for times in by_node.values():
            for first in range(len(times)):
                for last in range(first, len(times)):
                    allowed = BURST + PER_SECOND * (times[last] - times[first])
                    assert last - first + 1 <= allowed + 1e-6

    @invariant()
    def nothing_ends_twice(self) -> None:
        ends = Counter(
            self.fleet.ended(expired=True) + self.fleet.ended(expired=False) + self.fleet.refused()
        )
        assert all(times == 1 for times in ends.values())

    def teardown(self) -> None:
        """In calm everything comes to its one end, and the nodes hold what is wanted."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.settle(60)
        ended = set(fleet.ended(expired=True) + fleet.ended(expired=False) + fleet.refused())
        assert set(self.requests) <= ended | self.given_back
        assert len(fleet.scheduler.leases) == 0
        wanted = {node_id: set(node.boxes) for node_id, node in fleet.scheduler.view.nodes.items()}
        assert wanted == fleet.boxes


FleetMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestFleetLaws = FleetMachine.TestCase
