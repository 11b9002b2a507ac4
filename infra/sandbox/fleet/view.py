"""What the scheduler knows of nodes and boxes; it places nothing and gives no orders."""

from dataclasses import dataclass, field
from enum import StrEnum

from ostinato.infra.platform.admission import TokenBucket
from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.fleet.records import (
    NodeReport,
    NodeSpec,
    Pressure,
    Resources,
    Template,
)

_NOTHING = Resources()
_CALM = Pressure()


class BoxPhase(StrEnum):
    """Phase in the life of a box. It counts against its node in every phase."""

    STARTING = "starting"
    WARM = "warm"  # up and waiting for a lease
    LEASED = "leased"
    STOPPING = "stopping"  # ordered to end, not yet confirmed


@dataclass(slots=True, eq=False)
class NodeState:
    """One node: declared limits, what is promised of them, and what it last reported."""

    spec: NodeSpec
    bucket: TokenBucket
    heard_at_seconds: float
    limit: Resources
    pressure: Pressure = _CALM
    promised: Resources = _NOTHING  # sum over all boxes here
    unseen: Resources = _NOTHING  # the part of it that the last report cannot have shown
    # dictionaries keep their order; that of a set of strings changes from run to run
    boxes: dict[str, "BoxState"] = field(default_factory=dict)
    starting: dict[str, "BoxState"] = field(default_factory=dict)
    templates_seen: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class BoxState:
    """One box the scheduler knows of."""

    box_id: str
    node: NodeState
    template: Template
    phase: BoxPhase
    phase_since_seconds: float
    request_id: str | None = None  # who it starts for or is lent to; None: nobody


class ClusterView:
    """All nodes and boxes. `boxes` and `nodes` may be read by others; only its methods change them."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeState] = {}
        self.boxes: dict[str, BoxState] = {}
        self._idle: dict[str, dict[str, BoxState]] = {}  # template -> boxes that serve nobody yet

    def join(self, spec: NodeSpec, now_seconds: float) -> None:
        """A node that declares itself. It must not be there already."""
        if spec.node_id in self.nodes:
            raise SandboxError(f"node {spec.node_id} joined twice; wanted once until it is lost")
        bucket = TokenBucket(spec.starts_per_second, spec.start_burst, now_seconds)
        self.nodes[spec.node_id] = NodeState(spec, bucket, now_seconds, spec.limit)

    def leave(self, node_id: str) -> list[BoxState]:
        """Forget a node. The boxes that were on it."""
        lost = list(self.nodes.pop(node_id).boxes.values())
        for box in lost:
            del self.boxes[box.box_id]
            self._idle.get(box.template.name, {}).pop(box.box_id, None)
        return lost

    def heard(self, report: NodeReport, now_seconds: float) -> None:
        """Take a report in."""
        node = self.nodes[report.node_id]
        node.heard_at_seconds = now_seconds
        node.pressure = report.pressure
        node.unseen = _NOTHING
        for box in node.starting.values():
            node.unseen = node.unseen.plus(box.template.declared)

    def add(self, box: BoxState) -> None:
        """A box that is about to start on its node. Its phase is STARTING."""
        node = box.node
        self.boxes[box.box_id] = node.boxes[box.box_id] = node.starting[box.box_id] = box
        node.templates_seen.add(box.template.name)
        node.promised = node.promised.plus(box.template.declared)
        node.unseen = node.unseen.plus(box.template.declared)
        self._note_idle(box)

    def remove(self, box_id: str) -> BoxState:
        """A box that has ended."""
        box = self.boxes.pop(box_id)
        node = box.node
        del node.boxes[box_id]
        node.starting.pop(box_id, None)
        self._idle.get(box.template.name, {}).pop(box_id, None)
        # sums of floats drift; an empty node promises exactly nothing
        left = node.promised.plus(box.template.declared, sign=-1)
        node.promised = left if node.boxes else _NOTHING
        return box

    def set_phase(self, box: BoxState, phase: BoxPhase, now_seconds: float) -> None:
        """Move a box on in its life."""
        box.node.starting.pop(box.box_id, None)
        box.phase = phase
        box.phase_since_seconds = now_seconds
        self._note_idle(box)

    def detach(self, box: BoxState) -> None:
        """The box serves nobody from now on."""
        box.request_id = None
        self._note_idle(box)

    def num_idle(self, template: Template) -> int:
        """Boxes of a template that are warm or on their way to it."""
        return len(self._idle.get(template.name, {}))

    def warm(self, template_name: str) -> list[BoxState]:
        """Warm boxes of a template."""
        idle = self._idle.get(template_name, {}).values()
        return [box for box in idle if box.phase is BoxPhase.WARM]

    def _note_idle(self, box: BoxState) -> None:
        idle = self._idle.setdefault(box.template.name, {})
        is_unclaimed = box.phase is BoxPhase.STARTING and box.request_id is None
        if box.phase is BoxPhase.WARM or is_unclaimed:
            idle[box.box_id] = box
        else:
            idle.pop(box.box_id, None)
