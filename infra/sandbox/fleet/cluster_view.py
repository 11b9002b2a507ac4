"""What the scheduler knows of nodes and boxes; it places nothing and gives no orders."""

from dataclasses import dataclass, field
from enum import StrEnum

from ostinato.infra.platform.admission import TokenBucket
from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.fleet.records import NodeReport, NodeSpec, Resources, Template

_NOTHING = Resources()


class BoxPhase(StrEnum):
    """Phase in the life of a box. It counts against its node in every phase."""

    STARTING = "starting"
    WARM = "warm"  # up and waiting for a lease
    LEASED = "leased"
    STOPPING = "stopping"  # ordered to end, not yet confirmed


@dataclass(slots=True)
class BoxState:
    """One box the scheduler knows of."""

    box_id: str
    node_id: str
    template: Template
    phase: BoxPhase
    phase_since_seconds: float
    request_id: str | None = None  # who it starts for or is lent to; None: nobody


@dataclass(slots=True)
class NodeState:
    """One node: declared limits, what is promised of them, and what it last reported."""

    spec: NodeSpec
    bucket: TokenBucket
    heard_at_seconds: float
    limit: Resources
    used: Resources = _NOTHING  # as reported
    stall_ratio: float = 0.0  # the worst of the reported ones
    memory_stall_ratio: float = 0.0
    load_per_cpu: float = 0.0
    promised: Resources = _NOTHING  # sum over all boxes here
    unseen: Resources = _NOTHING  # the part of it that the last report cannot have shown
    # dictionaries are used as ordered sets: the order of a set of strings changes from run to run
    boxes: dict[str, None] = field(default_factory=dict)
    starting: dict[str, None] = field(default_factory=dict)
    warm: dict[str, dict[str, None]] = field(default_factory=dict)  # template -> box ids
    templates_seen: dict[str, None] = field(default_factory=dict)


class ClusterView:
    """All nodes and boxes. `boxes` and `nodes` may be read by others; only its methods change them."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeState] = {}
        self.boxes: dict[str, BoxState] = {}
        self._warm_nodes: dict[str, dict[str, None]] = {}  # template -> nodes with a warm box
        self._idle: dict[str, dict[str, None]] = {}  # template -> boxes that serve nobody yet

    def join(self, spec: NodeSpec, now_seconds: float) -> None:
        """A node that declares itself. It must not be there already."""
        if spec.node_id in self.nodes:
            raise SandboxError(f"node {spec.node_id} joined twice; wanted once until it is lost")
        bucket = TokenBucket(spec.starts_per_second, spec.start_burst, now_seconds)
        self.nodes[spec.node_id] = NodeState(spec, bucket, now_seconds, spec.limit)

    def leave(self, node_id: str) -> list[BoxState]:
        """Forget a node. The boxes that were on it."""
        node = self.nodes.pop(node_id)
        for template_name in node.warm:
            self._warm_nodes[template_name].pop(node_id, None)
        lost = [self.boxes.pop(box_id) for box_id in node.boxes]
        for box in lost:
            self._idle.get(box.template.name, {}).pop(box.box_id, None)
        return lost

    def heard(self, report: NodeReport, now_seconds: float) -> None:
        """Take a report in."""
        node = self.nodes[report.node_id]
        pressure = report.pressure
        node.heard_at_seconds = now_seconds
        node.used = pressure.used
        node.load_per_cpu = pressure.load_per_cpu
        node.memory_stall_ratio = pressure.memory_stall_ratio or 0.0
        stalls = (pressure.cpu_stall_ratio, pressure.memory_stall_ratio, pressure.disk_stall_ratio)
        node.stall_ratio = max(stall or 0.0 for stall in stalls)
        node.unseen = _NOTHING
        for box_id in node.starting:
            node.unseen = node.unseen.plus(self.boxes[box_id].template.declared)

    def add(self, box: BoxState) -> None:
        """A box that is about to start on its node. Its phase is STARTING."""
        node = self.nodes[box.node_id]
        self.boxes[box.box_id] = box
        node.boxes[box.box_id] = None
        node.starting[box.box_id] = None
        node.templates_seen[box.template.name] = None
        node.promised = node.promised.plus(box.template.declared)
        node.unseen = node.unseen.plus(box.template.declared)
        self._note_idle(box)

    def remove(self, box_id: str) -> BoxState:
        """A box that has ended."""
        box = self.boxes.pop(box_id)
        node = self.nodes[box.node_id]
        del node.boxes[box_id]
        node.starting.pop(box_id, None)
        self._note_warm(node, box, is_warm=False)
        self._idle.get(box.template.name, {}).pop(box_id, None)
        # sums of floats drift; an empty node promises exactly nothing
        left = node.promised.plus(box.template.declared, sign=-1)
        node.promised = left if node.boxes else _NOTHING
        return box

    def set_phase(self, box: BoxState, phase: BoxPhase, now_seconds: float) -> None:
        """Move a box on in its life."""
        node = self.nodes[box.node_id]
        node.starting.pop(box.box_id, None)
        self._note_warm(node, box, is_warm=phase is BoxPhase.WARM)
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

    def warm_nodes(self, template: Template) -> list[NodeState]:
        """Nodes with a warm box of a template."""
        return [self.nodes[node_id] for node_id in self._warm_nodes.get(template.name, {})]

    def _note_warm(self, node: NodeState, box: BoxState, *, is_warm: bool) -> None:
        warm = node.warm.setdefault(box.template.name, {})
        nodes = self._warm_nodes.setdefault(box.template.name, {})
        if is_warm:
            warm[box.box_id] = None
        else:
            warm.pop(box.box_id, None)
        if warm:
            nodes[node.spec.node_id] = None
        else:
            nodes.pop(node.spec.node_id, None)

    def _note_idle(self, box: BoxState) -> None:
        idle = self._idle.setdefault(box.template.name, {})
        is_unclaimed = box.phase is BoxPhase.STARTING and box.request_id is None
        if box.phase is BoxPhase.WARM or is_unclaimed:
            idle[box.box_id] = None
        else:
            idle.pop(box.box_id, None)
