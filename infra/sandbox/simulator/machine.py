"""A simulated node: cores that starts share with running boxes, memory that can run out.

It knows no leases and no requests.
"""

from collections import deque
from dataclasses import dataclass

import simpy

from ostinato.infra.sandbox.fleet.records import NodeSpec, Pressure, Resources

_STALL_BEGINS_RATIO = 0.95  # of memory in use: reclaim begins to hold tasks up
_LOAD_SECONDS = 10.0


@dataclass(slots=True)
class Usage:
    """What one box uses now."""

    cpus: float
    memory_bytes: int
    disk_bytes: int


class SimulatedNode:
    """One machine. After `die` nothing that still runs on it has an effect."""

    def __init__(self, environment: simpy.Environment, spec: NodeSpec, copies_at_once: int) -> None:
        self.spec = spec
        self.is_alive = True
        self.boxes: dict[str, Usage] = {}
        self.states: set[str] = set()
        self.arriving: dict[str, simpy.Event] = {}  # states under way to this node
        self.start_lanes = simpy.Resource(environment, capacity=max(1, int(spec.capacity.cpus)))
        self.copy_lanes = simpy.Resource(environment, capacity=copies_at_once)
        self._environment = environment
        self._cpus = 0.0
        self._memory_bytes = 0
        self._disk_bytes = 0
        self._newest: deque[str] = deque()
        self._load = 0.0
        self._load_at_seconds = environment.now

    def slowdown(self) -> float:
        """How much longer CPU work takes than on an idle node."""
        return max(1.0, self._cpus / self.spec.capacity.cpus)

    def set_usage(self, box_id: str, usage: Usage | None) -> None:
        """A box uses something else now; None: it is gone."""
        self._settle_load()
        old = self.boxes.pop(box_id, None)
        if old is not None:
            self._cpus -= old.cpus
            self._memory_bytes -= old.memory_bytes
            self._disk_bytes -= old.disk_bytes
        if usage is not None:
            if old is None:
                self._newest.append(box_id)
            self.boxes[box_id] = usage
            self._cpus += usage.cpus
            self._memory_bytes += usage.memory_bytes
            self._disk_bytes += usage.disk_bytes

    def out_of_memory(self) -> str | None:
        """The box the kernel would end now, the newest; None while memory suffices."""
        if self._memory_bytes <= self.spec.capacity.memory_bytes:
            return None
        while self._newest and self._newest[-1] not in self.boxes:
            self._newest.pop()
        return self._newest[-1] if self._newest else None

    def memory_ratio(self) -> float:
        """Used memory over capacity."""
        return self._memory_bytes / self.spec.capacity.memory_bytes

    def cpu_ratio(self) -> float:
        """Demand for CPU over capacity."""
        return self._cpus / self.spec.capacity.cpus

    def pressure(self) -> Pressure:
        """What a heartbeat says."""
        self._settle_load()
        demand = self.cpu_ratio()
        excess = (self.memory_ratio() - _STALL_BEGINS_RATIO) / (1 - _STALL_BEGINS_RATIO)
        return Pressure(
            cpu_stall_ratio=max(0.0, 1.0 - 1.0 / demand) if demand > 0 else 0.0,
            memory_stall_ratio=min(1.0, max(0.0, excess)),
            disk_stall_ratio=0.0,
            load_per_cpu=self._load,
            used=Resources(
                cpus=max(0.0, min(self._cpus, self.spec.capacity.cpus)),
                memory_bytes=max(0, self._memory_bytes),
                disk_bytes=max(0, self._disk_bytes),
            ),
        )

    def die(self) -> None:
        """The machine is gone with all it had."""
        self.is_alive = False
        self.boxes.clear()

    def _settle_load(self) -> None:
        """Load averages lag behind, as the kernel's do."""
        passed_seconds = self._environment.now - self._load_at_seconds
        if passed_seconds > 0:
            kept = 0.5 ** (passed_seconds / _LOAD_SECONDS)
            self._load = kept * self._load + (1 - kept) * self.cpu_ratio()
            self._load_at_seconds = self._environment.now
