"""Decides for a whole fleet: who gets a box, where it starts, when it ends.

`FleetScheduler`: requests, leases and boxes from admission to reaping. It acts on nothing and reads
no clock, so that a real fleet and a simulated one run the same code.

What holds at any time: what boxes declare stays within what their node declares; no request is
served while one of higher priority in its class waits; a lease ends once; a lease whose box is
lost gets another or its holder is told.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterable

from ostinato.infra.platform.errors import CapacityExhausted, SandboxError
from ostinato.infra.sandbox.fleet.admission import AdmissionQueue, Waiting
from ostinato.infra.sandbox.fleet.cluster_view import BoxPhase, BoxState, ClusterView, NodeState
from ostinato.infra.sandbox.fleet.leases import LeaseTable
from ostinato.infra.sandbox.fleet.placement import (
    can_ever_hold,
    choose_start_node,
    choose_warm_node,
    has_room,
    score,
)
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.reconciliation import compare
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    CleanBox,
    Granted,
    LeaseEnded,
    NodeReport,
    NodeSpec,
    Notice,
    Order,
    Priority,
    RefusalReason,
    Refused,
    StartBox,
    StopBox,
    StopReason,
    Template,
)
from ostinato.infra.sandbox.fleet.warm_pools import DemandMeter, warm_boxes_wanted

_WARM_STOPS_AT_ONCE = 8


class FleetScheduler:
    """The policy of one fleet. Call `take_orders` and `take_notices` after any other method."""

    def __init__(self, templates: Iterable[Template], policy: FleetPolicy | None = None) -> None:
        self.policy = policy or FleetPolicy()
        self.templates = {template.name: template for template in templates}
        self.view = ClusterView()
        self.queue = AdmissionQueue(self.policy.most_waiting)
        self.leases = LeaseTable()
        self.num_warm_hits = 0  # requests served by a warm box
        self._starting: dict[str, tuple[Waiting, str]] = {}  # by request id: with its box
        self._held: dict[str, tuple[Waiting, str]] = {}  # by request id: with its box
        self._meters: dict[str, DemandMeter] = {}
        self._box_numbers = itertools.count(1)
        self._orders: list[Order] = []
        self._notices: list[Notice] = []
        self._due: deque[tuple[float, str]] = deque()  # boxes starting or cleaning, since when
        self._num_evicted = 0  # warm boxes told to stop in this tick to make room
        self._warmed_at_seconds = float("-inf")

    # ---- what the caller collects

    def take_orders(self) -> list[Order]:
        """Orders since the last call, to be given to their nodes in this order."""
        orders, self._orders = self._orders, []
        return orders

    def take_notices(self) -> list[Notice]:
        """Notices since the last call."""
        notices, self._notices = self._notices, []
        return notices

    # ---- holders

    def ask(self, request: BoxRequest, now_seconds: float) -> None:
        """Put a request in line; nothing happens when it is known already.

        CapacityExhausted when its line is full or no node that is here could ever hold the box.
        """
        template = self.templates.get(request.template)
        if template is None:
            known = ", ".join(sorted(self.templates)) or "none"
            raise SandboxError(
                f"request {request.request_id}: template {request.template} is unknown; "
                f"wanted one of: {known}"
            )
        request_id = request.request_id
        if self.is_live(request_id):
            return
        share = self.policy.placement.headroom[request.priority]
        nodes = self.view.by_class.get(template.place_class, [])
        # without any node it waits: nodes that were lost may come back
        if nodes and not any(can_ever_hold(node, template, share) for node in nodes):
            raise CapacityExhausted(
                f"request {request_id}: not one of {len(nodes)} nodes of class "
                f"{'/'.join(template.place_class)} is large enough for {template.declared}"
            )
        give_up = now_seconds + request.wait_seconds
        self.queue.push(Waiting(request, template.place_class, give_up))
        meter = self._meters.get(template.name)
        if meter is None:
            meter = DemandMeter(self.policy.demand_half_life_seconds, now_seconds)
            self._meters[template.name] = meter
        meter.count(now_seconds)

    def renew(self, request_id: str, now_seconds: float) -> float | None:
        """Keep a lease alive; when it now ends, or None when it is over."""
        lease = self.leases.renew(request_id, now_seconds)
        return None if lease is None else lease.expires_at_seconds

    def release(self, request_id: str, now_seconds: float) -> bool:
        """End a lease, or a request that waits. False when it was over already."""
        was_live = self.leases.release(request_id) is not None
        return self._forget(request_id, StopReason.RELEASED, now_seconds) or was_live

    def release_holder(self, holder_id: str, now_seconds: float) -> int:
        """End all leases of a holder that is known to be gone; how many."""
        request_ids = self.leases.held_by(holder_id)
        for request_id in request_ids:
            self.release(request_id, now_seconds)
        return len(request_ids)

    def is_live(self, request_id: str) -> bool:
        """Whether a request waits, starts or has its box."""
        return request_id in self.queue or request_id in self._starting or request_id in self._held

    def box_of(self, request_id: str) -> BoxState | None:
        """The box a lease has now; None while it has none."""
        held = self._held.get(request_id)
        return None if held is None else self.view.boxes[held[1]]

    def save_state(self, state_id: str, request_id: str) -> None:
        """Note that the node of a lease's box has saved a state that can be forked."""
        box = self.box_of(request_id)
        if box is None:
            raise SandboxError(f"state {state_id}: lease {request_id} has no box; wanted one")
        self.view.save_state(state_id, box.node_id)

    def drop_state(self, state_id: str) -> None:
        """Note that a saved state is gone; forks of it are refused from now on."""
        self.view.drop_state(state_id)

    # ---- nodes

    def join(self, spec: NodeSpec, now_seconds: float) -> None:
        """A node offers itself. Boxes it has from before show as strays in its first report."""
        if spec.node_id in self.view.nodes:
            self._lose_node(spec.node_id, now_seconds)
        self.view.join(spec, now_seconds)

    def drain(self, node_id: str) -> None:
        """Start nothing more on a node; what runs there goes on."""
        self.view.nodes[node_id].is_draining = True

    def report(self, report: NodeReport, now_seconds: float) -> bool:
        """Take a heartbeat in and mend what it shows. False: the node is lost and must join anew."""
        if report.node_id not in self.view.nodes:
            return False
        node = self.view.heard(report, now_seconds)
        if report.boxes is None:
            return True
        differences = compare(
            [self.view.boxes[box_id] for box_id in node.boxes],
            report.boxes,
            counted_at_seconds=report.counted_at_seconds,
            stop_repeat_seconds=self.policy.stop_repeat_seconds,
        )
        for box in differences.vanished:
            self.view.remove(box.box_id)
            self._mend(box, now_seconds)
        for box in differences.ended:
            self.view.remove(box.box_id)
        for box in differences.lingering:
            self._stop(box, StopReason.STRAY, now_seconds)
        for box_id in differences.strays:
            self._orders.append(
                StopBox(box_id=box_id, node_id=node.spec.node_id, reason=StopReason.STRAY)
            )
        return True

    def box_up(self, box_id: str, now_seconds: float) -> None:
        """Answer to StartBox and CleanBox: the box is ready."""
        box = self.view.boxes.get(box_id)
        if box is None or box.phase not in (BoxPhase.STARTING, BoxPhase.CLEANING):
            return
        if box.phase is BoxPhase.STARTING:
            meter = self._meters.get(box.template.name)
            if meter is not None:
                meter.note_start(now_seconds - box.phase_since_seconds)
        starting = self._starting.pop(box.request_id, None) if box.request_id else None
        if starting is not None:
            state_id = starting[0].request.fork_of
            if state_id in self.view.state_nodes:
                self.view.save_state(state_id, box.node_id)
            self._lend(box, starting[0], now_seconds)
        elif box.was_forked or self.view.num_idle(box.template) > self._warm_wanted(
            box.template, now_seconds
        ):
            self._stop(box, StopReason.SURPLUS, now_seconds)
        else:
            self.view.set_phase(box, BoxPhase.WARM, now_seconds)

    def box_failed(self, box_id: str, now_seconds: float) -> None:
        """Answer to StartBox and CleanBox, or news of any box: it is gone."""
        if box_id in self.view.boxes:
            self._mend(self.view.remove(box_id), now_seconds)

    def box_stopped(self, box_id: str) -> None:
        """Answer to StopBox."""
        box = self.view.boxes.get(box_id)
        if box is not None and box.phase is BoxPhase.STOPPING:
            self.view.remove(box_id)

    # ---- time

    def tick(self, now_seconds: float, rng: random.Random) -> None:
        """Do all that time brings about, then place what waits. Call it many times a second."""
        limit_seconds = now_seconds - self.policy.node_silence_seconds
        silent = [
            node_id
            for node_id, node in self.view.nodes.items()
            if node.heard_at_seconds < limit_seconds
        ]
        for node_id in silent:
            self._lose_node(node_id, now_seconds)
        for lease in self.leases.reap(now_seconds):
            self._forget(lease.lease_id, StopReason.LEASE_EXPIRED, now_seconds)
            self._notices.append(
                LeaseEnded(request_id=lease.lease_id, holder_id=lease.holder_id, was_expired=True)
            )
        for waiting in self.queue.give_up(now_seconds):
            self._refuse(waiting, RefusalReason.NO_CAPACITY)
        self._end_late_starts(now_seconds)
        self._num_evicted = 0
        self.place(now_seconds, rng)
        if now_seconds - self._warmed_at_seconds >= self.policy.warm_interval_seconds:
            self._warmed_at_seconds = now_seconds
            self._keep_warm(now_seconds, rng)

    def place(self, now_seconds: float, rng: random.Random) -> None:
        """Serve the lines as far as there is room and rate. `tick` does this too."""
        for place_class in self.queue.place_classes:
            while (waiting := self.queue.head(place_class)) is not None:
                if not self._serve(waiting, now_seconds, rng):
                    break

    # ---- placing

    def _serve(self, waiting: Waiting, now_seconds: float, rng: random.Random) -> bool:
        """Give the head of a line its box or its refusal; False when it must wait."""
        request = waiting.request
        template = self.templates[request.template]
        nodes = self.view.by_class.get(waiting.place_class, [])
        policy = self.policy.placement
        copy_from = None
        if request.fork_of is not None:
            homes = [
                self.view.nodes[node_id]
                for node_id in self.view.state_nodes.get(request.fork_of, {})
            ]
            if not homes:
                self.queue.remove(request.request_id)
                self._refuse(waiting, RefusalReason.STATE_LOST)
                return True
            node = choose_start_node(
                homes, template, request.priority, policy, rng=rng, now_seconds=now_seconds
            )
            if node is None or score(node, template, policy) > policy.fork_home_ceiling:
                node = choose_start_node(
                    nodes, template, request.priority, policy, rng=rng, now_seconds=now_seconds
                )
                source = min(homes, key=lambda home: (home.stall_ratio, home.load_per_cpu))
                if node is not None and request.fork_of not in node.states:
                    copy_from = source.spec.node_id
        else:
            warm_nodes = [
                self.view.nodes[node_id] for node_id in self.view.warm_nodes.get(template.name, {})
            ]
            warm_node = choose_warm_node(warm_nodes, template, policy, rng=rng)
            if warm_node is not None:
                self.queue.remove(request.request_id)
                self.num_warm_hits += 1
                box_id = next(iter(warm_node.warm[template.name]))
                self._lend(self.view.boxes[box_id], waiting, now_seconds)
                return True
            node = choose_start_node(
                nodes, template, request.priority, policy, rng=rng, now_seconds=now_seconds
            )
        if node is None:
            if not any(has_room(node, template, request.priority, policy) for node in nodes):
                self._make_room(nodes, now_seconds)
            return False
        self.queue.remove(request.request_id)
        box = self._start(node, template, now_seconds, request=request, copy_from=copy_from)
        self._starting[request.request_id] = (waiting, box.box_id)
        return True

    def _start(
        self,
        node: NodeState,
        template: Template,
        now_seconds: float,
        *,
        request: BoxRequest | None,
        copy_from: str | None = None,
    ) -> BoxState:
        if not node.bucket.take(now_seconds):
            raise SandboxError(f"node {node.spec.node_id} has no start token; wanted one")
        box = BoxState(
            box_id=f"box-{next(self._box_numbers)}",
            node_id=node.spec.node_id,
            template=template,
            phase=BoxPhase.STARTING,
            phase_since_seconds=now_seconds,
            request_id=None if request is None else request.request_id,
            was_forked=request is not None and request.fork_of is not None,
        )
        self.view.add(box)
        self._due.append((now_seconds, box.box_id))
        self._orders.append(
            StartBox(
                box_id=box.box_id,
                node_id=box.node_id,
                template=template.name,
                state_id=None if request is None else request.fork_of,
                copy_from=copy_from,
            )
        )
        return box

    def _lend(self, box: BoxState, waiting: Waiting, now_seconds: float) -> None:
        request = waiting.request
        box.request_id = request.request_id
        self.view.set_phase(box, BoxPhase.LEASED, now_seconds)
        if request.request_id not in self.leases:  # it is live when the lease lost its box
            self.leases.grant(
                request.request_id, request.holder_id, request.lease_seconds, now_seconds
            )
        self._held[request.request_id] = (waiting, box.box_id)
        self._notices.append(
            Granted(
                request_id=request.request_id,
                box_id=box.box_id,
                node_id=box.node_id,
                expires_at_seconds=self.leases.expiry(request.request_id),
                num_moves=waiting.num_moves,
            )
        )

    # ---- ends

    def _forget(self, request_id: str, reason: StopReason, now_seconds: float) -> bool:
        """Drop a request wherever it is; its box is cleaned for another or ended."""
        if self.queue.remove(request_id) is not None:
            return True
        starting = self._starting.pop(request_id, None)
        if starting is not None:
            self.view.detach(self.view.boxes[starting[1]])
            return True
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        box = self.view.boxes[held[1]]
        self.view.detach(box)
        is_wanted = self.view.num_idle(box.template) < self._warm_wanted(box.template, now_seconds)
        if is_wanted and box.template.is_reusable and not box.was_forked:
            self.view.set_phase(box, BoxPhase.CLEANING, now_seconds)
            self._due.append((now_seconds, box.box_id))
            self._orders.append(CleanBox(box_id=box.box_id, node_id=box.node_id))
        else:
            self._stop(box, reason, now_seconds)
        return True

    def _stop(self, box: BoxState, reason: StopReason, now_seconds: float) -> None:
        self.view.set_phase(box, BoxPhase.STOPPING, now_seconds)
        self._orders.append(StopBox(box_id=box.box_id, node_id=box.node_id, reason=reason))

    def _refuse(self, waiting: Waiting, reason: RefusalReason) -> None:
        """End a request that is in no line any more; a live lease ends with it."""
        request = waiting.request
        lease = self.leases.release(request.request_id)
        if lease is None:
            self._notices.append(Refused(request_id=request.request_id, reason=reason))
        else:
            self._notices.append(
                LeaseEnded(
                    request_id=request.request_id, holder_id=lease.holder_id, was_expired=False
                )
            )

    def _lose_node(self, node_id: str, now_seconds: float) -> None:
        # the last lost goes to the front last: the oldest box is served first again
        for box in reversed(self.view.leave(node_id)):
            self._mend(box, now_seconds)

    def _mend(self, box: BoxState, now_seconds: float) -> None:
        """Do right by whoever had, or waited for, a box that is gone from the view."""
        if box.request_id is None:
            return
        starting = self._starting.pop(box.request_id, None)
        if starting is not None:
            waiting = starting[0]
            waiting.num_tries += 1
            if waiting.num_tries >= self.policy.num_start_tries:
                self._refuse(waiting, RefusalReason.START_FAILED)
            else:
                self.queue.push_front(waiting)
            return
        held = self._held.pop(box.request_id, None)
        if held is None:
            return
        waiting = held[0]
        if waiting.request.is_movable:
            waiting.num_moves += 1
            waiting.num_tries = 0
            waiting.give_up_at_seconds = now_seconds + waiting.request.wait_seconds
            self.queue.push_front(waiting)
        else:
            self._refuse(waiting, RefusalReason.NO_CAPACITY)

    def _end_late_starts(self, now_seconds: float) -> None:
        limit_seconds = now_seconds - self.policy.start_seconds
        while self._due and self._due[0][0] < limit_seconds:
            since_seconds, box_id = self._due.popleft()
            box = self.view.boxes.get(box_id)
            if (
                box is not None
                and box.phase in (BoxPhase.STARTING, BoxPhase.CLEANING)
                and box.phase_since_seconds == since_seconds
            ):
                self._stop(box, StopReason.START_TIMEOUT, now_seconds)
                self._mend(box, now_seconds)
                box.request_id = None

    # ---- warm boxes

    def _warm_wanted(self, template: Template, now_seconds: float) -> int:
        return warm_boxes_wanted(template, self._meters.get(template.name), now_seconds)

    def _make_room(self, nodes: list[NodeState], now_seconds: float) -> None:
        """A request waits: end a few warm boxes, which serve nobody."""
        for node in nodes:
            for warm in node.warm.values():
                if self._num_evicted >= _WARM_STOPS_AT_ONCE:
                    return
                if warm:
                    self._num_evicted += 1
                    box = self.view.boxes[next(iter(warm))]
                    self._stop(box, StopReason.SURPLUS, now_seconds)

    def _keep_warm(self, now_seconds: float, rng: random.Random) -> None:
        """Start or end warm boxes; not while a request of the class waits."""
        for template in self.templates.values():
            if template.warm_maximum == 0 or self.queue.head(template.place_class) is not None:
                continue
            nodes = self.view.by_class.get(template.place_class, [])
            wanted = self._warm_wanted(template, now_seconds)
            for _ in range(wanted - self.view.num_idle(template)):
                node = choose_start_node(
                    nodes,
                    template,
                    Priority.TRAINING,
                    self.policy.placement,
                    rng=rng,
                    now_seconds=now_seconds,
                )
                if node is None:
                    break
                self._start(node, template, now_seconds, request=None)
            surplus = self.view.num_idle(template) - wanted
            for node in nodes:
                for box_id in list(node.warm.get(template.name, {}))[: max(0, surplus)]:
                    self._stop(self.view.boxes[box_id], StopReason.SURPLUS, now_seconds)
                    surplus -= 1
