"""Decides for a whole fleet: who gets a box, where it starts, when it ends.

It acts on nothing and reads no clock. What holds at any time: what boxes declare stays within what
their node declares; requests are served in their order; a lease ends once; the holder of a lease
whose box is lost is told.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.infra.platform.admission import AdmissionQueue
from ostinato.infra.platform.errors import CapacityExhausted, SandboxError
from ostinato.infra.sandbox.fleet.box_lifecycle import BoxLifecycle
from ostinato.infra.sandbox.fleet.leases import LeaseTable
from ostinato.infra.sandbox.fleet.placement import (
    PROMISED_CEILING,
    choose_start_node,
    choose_warm_box,
    has_room,
)
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
    Template,
)
from ostinato.infra.sandbox.fleet.view import BoxPhase, BoxState, ClusterView
from ostinato.infra.sandbox.fleet.warm_pools import WarmPools

_RANK = 0  # one line for all requests
_START_TRIES = 3


@dataclass(slots=True)
class Waiting:
    """A request in the queue, or on its way to a box."""

    request: BoxRequest
    give_up_at_seconds: float
    num_tries: int = 0  # starts that failed


class FleetScheduler:
    """The policy of one fleet. Call `take_orders` and `take_notices` after any other method."""

    def __init__(self, templates: Iterable[Template], policy: FleetPolicy | None = None) -> None:
        self.policy = policy or FleetPolicy()
        self.templates = {template.name: template for template in templates}
        self.view = ClusterView()
        self.queue: AdmissionQueue[Waiting] = AdmissionQueue()
        self.leases = LeaseTable()
        self._boxes = BoxLifecycle(self.view, self.policy.start_seconds)
        self._warm = WarmPools(self.view, self._boxes, self.policy.demand_half_life_seconds)
        self._starting: dict[str, Waiting] = {}  # by request id: a box starts for it
        self._served: dict[str, BoxState] = {}  # by request id: starts for it or is lent to it
        self._notices: list[Notice] = []

    def take_orders(self) -> list[Order]:
        """Orders since the last call, to be given to their nodes in this order."""
        return self._boxes.take_orders()

    def take_notices(self) -> list[Notice]:
        """Notices since the last call."""
        notices, self._notices = self._notices, []
        return notices

    # ---- holders

    def ask(self, request: BoxRequest, now_seconds: float) -> None:
        """Put a request in line. CapacityExhausted when no node here could ever hold the box."""
        request_id = request.request_id
        template = self.templates.get(request.template)
        if template is None:
            known = ", ".join(sorted(self.templates)) or "none"
            raise SandboxError(
                f"request {request_id}: template {request.template} is unknown; "
                f"wanted one of: {known}"
            )
        nodes = self.view.nodes.values()
        # without any node it waits: nodes that were lost may come back
        if nodes and not any(
            template.declared.fits(node.limit, PROMISED_CEILING) for node in nodes
        ):
            raise CapacityExhausted(
                f"request {request_id}: not one of {len(nodes)} nodes is large enough for "
                f"{template.declared}"
            )
        self._enter(Waiting(request, now_seconds + request.wait_seconds), at_front=False)
        self._warm.count_request(template, now_seconds)

    def renew(self, request_id: str, now_seconds: float) -> bool:
        """Keep a lease alive. False when it is over."""
        return self.leases.renew(request_id, now_seconds)

    def release(self, request_id: str, now_seconds: float) -> None:
        """End a lease, or a request that waits. Nothing when it was over already."""
        self.leases.release(request_id)
        self._forget(request_id, now_seconds)

    # ---- nodes

    def join(self, spec: NodeSpec, now_seconds: float) -> None:
        """A node offers itself. Boxes it has from before show as strays in its first report."""
        if spec.node_id in self.view.nodes:
            self._lose_node(spec.node_id)
        self.view.join(spec, now_seconds)

    def report(self, report: NodeReport, now_seconds: float) -> bool:
        """Take a heartbeat in and mend what it shows. False: the node is lost and must join anew."""
        if report.node_id not in self.view.nodes:
            return False
        if not self.policy.uses_observations:
            report = report.model_copy(update={"pressure": Pressure()})
        self.view.heard(report, now_seconds)
        for box in self._boxes.reconcile(report, now_seconds):
            self._tell_of_loss(box)
        return True

    def box_up(self, box_id: str, now_seconds: float) -> None:
        """Answer to StartBox: the box is ready."""
        box = self.view.boxes.get(box_id)
        if box is None or box.phase is not BoxPhase.STARTING:
            return
        self._warm.note_start(box.template, now_seconds - box.phase_since_seconds)
        starting = self._starting.pop(box.request_id, None) if box.request_id else None
        if starting is not None:
            self._lend(box, starting, now_seconds)
        elif self._warm.has_too_many(box.template, now_seconds):
            self._boxes.stop(box, now_seconds)
        else:
            self.view.set_phase(box, BoxPhase.WARM, now_seconds)

    def box_failed(self, box_id: str) -> None:
        """Answer to StartBox, or news of any box: it is gone."""
        if box_id in self.view.boxes:
            self._tell_of_loss(self.view.remove(box_id))

    def box_stopped(self, box_id: str) -> None:
        """Answer to StopBox."""
        box = self.view.boxes.get(box_id)
        if box is not None and box.phase is BoxPhase.STOPPING:
            self.view.remove(box_id)

    # ---- time

    def tick(self, now_seconds: float, rng: random.Random) -> None:
        """Do all that time brings about, then place what waits. Call it many times a second."""
        limit_seconds = now_seconds - self.policy.node_silence_seconds
        nodes = self.view.nodes.items()
        for node_id in [name for name, node in nodes if node.heard_at_seconds < limit_seconds]:
            self._lose_node(node_id)
        for request_id in self.leases.reap(now_seconds):
            self._forget(request_id, now_seconds)
            self._notices.append(LeaseEnded(request_id=request_id, was_expired=True))
        for waiting in self.queue.expire(now_seconds):
            self._refuse(waiting, "no room in time")
        for box in self._boxes.stop_late_starts(now_seconds):
            self._tell_of_loss(box)
            box.request_id = None
        self.place(now_seconds, rng)
        if self.queue.head() is None:
            self._warm.tick(self.templates.values(), now_seconds, rng)

    def place(self, now_seconds: float, rng: random.Random) -> None:
        """Serve the queue as far as there is room and rate. `tick` does this too."""
        self.queue.place(lambda waiting: self._serve(waiting, now_seconds, rng))

    def _serve(self, waiting: Waiting, now_seconds: float, rng: random.Random) -> bool:
        """Give a request its box or start one for it. False when it must wait."""
        request = waiting.request
        template = self.templates[request.template]
        warm = choose_warm_box(self.view.warm(template.name), rng)
        if warm is not None:
            self._lend(warm, waiting, now_seconds)
            return True
        nodes = list(self.view.nodes.values())
        node = choose_start_node(nodes, template, rng=rng, now_seconds=now_seconds)
        if node is None:
            if not any(has_room(node, template) for node in nodes):
                self._warm.make_room(self.templates, now_seconds)
            return False
        box = self._boxes.start(node, template, now_seconds, request.request_id)
        self._starting[request.request_id] = waiting
        self._served[request.request_id] = box
        return True

    def _enter(self, waiting: Waiting, *, at_front: bool) -> None:
        request = waiting.request
        self.queue.push(
            request.request_id,
            waiting,
            rank=_RANK,
            until_seconds=waiting.give_up_at_seconds,
            at_front=at_front,
        )

    def _lend(self, box: BoxState, waiting: Waiting, now_seconds: float) -> None:
        request = waiting.request
        box.request_id = request.request_id
        self.view.set_phase(box, BoxPhase.LEASED, now_seconds)
        self.leases.grant(request.request_id, request.lease_seconds, now_seconds)
        self._served[request.request_id] = box
        self._notices.append(
            Granted(request_id=request.request_id, box_id=box.box_id, node_id=box.node.spec.node_id)
        )

    # ---- ends

    def _forget(self, request_id: str, now_seconds: float) -> None:
        """Drop a request wherever it is. A used box ends; one that only starts may stay warm."""
        self.queue.remove(request_id)
        starting = self._starting.pop(request_id, None)
        box = self._served.pop(request_id, None)
        if box is not None:
            self.view.detach(box)
            if starting is None:
                self._boxes.stop(box, now_seconds)

    def _refuse(self, waiting: Waiting, reason: str) -> None:
        self._notices.append(Refused(request_id=waiting.request.request_id, reason=reason))

    def _lose_node(self, node_id: str) -> None:
        # the last lost goes to the front last: the oldest box is served first again
        for box in reversed(self.view.leave(node_id)):
            self._tell_of_loss(box)

    def _tell_of_loss(self, box: BoxState) -> None:
        """Start again for whoever waited for a box that is gone, or tell its holder."""
        if box.request_id is None:
            return
        self._served.pop(box.request_id, None)
        waiting = self._starting.pop(box.request_id, None)
        if waiting is not None:
            waiting.num_tries += 1
            if waiting.num_tries >= _START_TRIES:
                self._refuse(waiting, "every start failed")
            else:
                self._enter(waiting, at_front=True)
        elif self.leases.release(box.request_id):
            self._notices.append(LeaseEnded(request_id=box.request_id, was_expired=False))
