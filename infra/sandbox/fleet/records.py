"""What holders, the scheduler and the nodes say to one another.

The records of the fleet: templates, requests, nodes with their reports, the orders that the
scheduler gives to nodes and the notices that it gives to holders. Nothing here decides or acts.
"""

from enum import IntEnum, StrEnum

from pydantic import Field, field_validator

from ostinato.infra.sandbox.protocol import SandboxRecord


class Priority(IntEnum):
    """Who is served first; a lower value never passes a higher one."""

    TRAINING = 0
    EVALUATION = 1
    VERIFIER = 2


class Resources(SandboxRecord):
    """Amounts of what boxes use up on a node."""

    cpus: float = Field(ge=0)
    memory_bytes: int = Field(ge=0)
    disk_bytes: int = Field(ge=0)


class Template(SandboxRecord):
    """A kind of box that can be started and kept warm."""

    name: str
    declared: Resources = Field(description="what one box may use; the sum on a node is bounded")
    backend: str = Field(default="namespace", description="how the box is isolated")
    architecture: str = "x86_64"
    warm_minimum: int = Field(default=0, description="warm boxes kept in the fleet without demand")
    warm_maximum: int = Field(default=0, description="warm boxes kept in the fleet at most")
    is_reusable: bool = Field(
        default=True, description="whether a returned box is cleaned and lent again"
    )

    @property
    def place_class(self) -> tuple[str, str]:
        """Requests of one class compete for the same nodes; priority is strict within it."""
        return self.architecture, self.backend


class BoxRequest(SandboxRecord):
    """One box wanted by one holder."""

    request_id: str = Field(
        description="of the caller's choice; names the lease too; asked again while live: ignored"
    )
    template: str
    holder_id: str = Field(description="who keeps the lease alive")
    priority: Priority = Priority.TRAINING
    lease_seconds: float = Field(
        default=1800.0, gt=0, description="not renewed for so long: reaped"
    )
    wait_seconds: float = Field(default=120.0, gt=0, description="refused when still in line then")
    fork_of: str | None = Field(
        default=None, description="id of a saved state the box continues; None: the template"
    )
    is_movable: bool = Field(
        default=True,
        description="whether a box lost with its node is started again elsewhere, under the same lease",
    )


class NodeSpec(SandboxRecord):
    """What a node declares when it joins."""

    node_id: str
    capacity: Resources = Field(description="every amount above zero")
    architecture: str = "x86_64"
    backends: tuple[str, ...] = ("namespace",)
    starts_per_second: float = Field(default=50.0, gt=0, description="steady rate of box starts")
    start_burst: int = Field(default=50, ge=1, description="starts allowed at once after a pause")
    most_starting: int = Field(
        default=64, ge=1, description="boxes that may be starting at once: a slow node gets fewer"
    )
    cpu_overcommit_ratio: float = Field(default=4.0, ge=1, description="declared cpus over cores")
    memory_overcommit_ratio: float = Field(default=1.0, ge=1)
    disk_overcommit_ratio: float = Field(default=1.0, ge=1)

    @field_validator("capacity")
    @classmethod
    def _check_capacity(cls, capacity: Resources) -> Resources:
        if min(capacity.cpus, capacity.memory_bytes, capacity.disk_bytes) <= 0:
            raise ValueError(f"node capacity is {capacity}; wanted every amount above 0")
        return capacity

    @property
    def limit(self) -> Resources:
        """What the boxes of this node may declare together."""
        return Resources(
            cpus=self.capacity.cpus * self.cpu_overcommit_ratio,
            memory_bytes=int(self.capacity.memory_bytes * self.memory_overcommit_ratio),
            disk_bytes=int(self.capacity.disk_bytes * self.disk_overcommit_ratio),
        )


class Pressure(SandboxRecord):
    """What a node feels now; stall ratios are None where the kernel does not report them."""

    cpu_stall_ratio: float | None = Field(default=None, description="share of time tasks waited")
    memory_stall_ratio: float | None = None
    disk_stall_ratio: float | None = None
    load_per_cpu: float = 0.0
    used: Resources = Resources(cpus=0, memory_bytes=0, disk_bytes=0)


class NodeReport(SandboxRecord):
    """A node's heartbeat: what it feels and which boxes it has."""

    node_id: str
    pressure: Pressure
    boxes: frozenset[str] | None = Field(
        default=None, description="every box seen; None: this heartbeat did not count them"
    )
    counted_at_seconds: float = Field(
        default=0.0, description="scheduler's time at which the count was asked for"
    )


class StopReason(StrEnum):
    """Why the scheduler ends a box."""

    RELEASED = "released"  # the holder gave it back and it is not kept
    LEASE_EXPIRED = "lease_expired"  # the holder was silent for the length of its lease
    STRAY = "stray"  # a node has it, the scheduler does not want it
    SURPLUS = "surplus"  # warm, and no longer needed or in the way of a request
    START_TIMEOUT = "start_timeout"  # was not up in time
    WITHDRAWN = "withdrawn"  # the request ended while the box was starting


class StartBox(SandboxRecord):
    """Order to a node: start a box and say when it is up."""

    box_id: str
    node_id: str
    template: str
    state_id: str | None = Field(default=None, description="saved state to continue; None: fresh")
    copy_from: str | None = Field(
        default=None, description="node to fetch that state from; None: it is here"
    )


class CleanBox(SandboxRecord):
    """Order to a node: bring a returned box back to its template's state."""

    box_id: str
    node_id: str


class StopBox(SandboxRecord):
    """Order to a node: end a box; done again does no harm."""

    box_id: str
    node_id: str
    reason: StopReason


class Granted(SandboxRecord):
    """Notice: the request has its box. Comes again with another box when the first was lost."""

    request_id: str
    box_id: str
    node_id: str
    expires_at_seconds: float
    num_moves: int = Field(default=0, description="how often the lease changed its box")


class RefusalReason(StrEnum):
    """Why a request got no box."""

    NO_CAPACITY = "no_capacity"  # waited as long as it wanted to
    STATE_LOST = "state_lost"  # no node has the state to fork
    START_FAILED = "start_failed"  # every try failed


class Refused(SandboxRecord):
    """Notice: the request ends without a box. The holder may ask again."""

    request_id: str
    reason: RefusalReason


class LeaseEnded(SandboxRecord):
    """Notice: a lease ended and not by its holder's wish."""

    request_id: str
    holder_id: str
    was_expired: bool = Field(description="True: not renewed in time. False: its box was lost")


Order = StartBox | CleanBox | StopBox
Notice = Granted | Refused | LeaseEnded
