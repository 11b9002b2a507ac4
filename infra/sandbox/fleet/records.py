"""What holders, the scheduler and the nodes say to one another."""

from pydantic import Field, field_validator

from ostinato.infra.platform.record import Record


class Resources(Record):
    """Amounts of what boxes use up on a node."""

    cpus: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0

    def plus(self, other: "Resources", *, sign: int = 1) -> "Resources":
        """The sum. With `sign` -1 the difference."""
        return Resources.model_construct(
            cpus=self.cpus + sign * other.cpus,
            memory_bytes=self.memory_bytes + sign * other.memory_bytes,
            disk_bytes=self.disk_bytes + sign * other.disk_bytes,
        )

    def fits(self, limit: "Resources", share: float) -> bool:
        """Whether no amount is over its share of a limit."""
        return (
            self.cpus <= limit.cpus * share
            and self.memory_bytes <= limit.memory_bytes * share
            and self.disk_bytes <= limit.disk_bytes * share
        )

    def ratio(self, limit: "Resources") -> float:
        """The largest of the amounts over their limits."""
        return max(
            self.cpus / limit.cpus,
            self.memory_bytes / limit.memory_bytes,
            self.disk_bytes / limit.disk_bytes,
        )


class Template(Record):
    """A kind of box that can be started and kept warm."""

    name: str
    declared: Resources = Field(description="what one box may use; the sum on a node is bounded")
    warm_maximum: int = Field(default=0, description="warm boxes kept in the fleet at most")


class BoxRequest(Record):
    """One box wanted by one holder."""

    request_id: str = Field(description="of the caller's choice, new; names the lease too")
    template: str
    lease_seconds: float = Field(
        default=1800.0, gt=0, description="not renewed for so long: reaped"
    )
    wait_seconds: float = Field(default=120.0, gt=0, description="refused when still in line then")


class NodeSpec(Record):
    """Declaration of a node when it joins."""

    node_id: str
    capacity: Resources = Field(description="every amount above zero")
    starts_per_second: float = Field(default=50.0, gt=0, description="steady rate of box starts")
    start_burst: int = Field(default=50, ge=1, description="starts allowed at once after a pause")
    most_starting: int = Field(
        default=64, ge=1, description="boxes that may be starting at once: a slow node gets fewer"
    )
    cpu_overcommit_ratio: float = Field(default=4.0, ge=1, description="declared cpus over cores")

    @field_validator("capacity")
    @classmethod
    def _check_capacity(cls, capacity: Resources) -> Resources:
        if min(capacity.cpus, capacity.memory_bytes, capacity.disk_bytes) <= 0:
            raise ValueError(f"node capacity is {capacity}; wanted every amount above 0")
        return capacity

    @property
    def limit(self) -> Resources:
        """Resources that the boxes of this node may declare together."""
        cpus = self.capacity.cpus * self.cpu_overcommit_ratio
        return self.capacity.model_copy(update={"cpus": cpus})


class FleetPolicy(Record):
    """Settings of a fleet's scheduler."""

    uses_observations: bool = Field(
        default=True, description="False: nodes are chosen by promises alone, whatever they report"
    )
    node_silence_seconds: float = Field(
        default=10.0, gt=0, description="a node not heard of for so long is lost"
    )
    start_seconds: float = Field(default=30.0, gt=0, description="a start that takes longer failed")
    demand_half_life_seconds: float = Field(default=30.0, gt=0)
    heartbeat_seconds: float = Field(default=2.0, gt=0, description="between a node's reports")


class Pressure(Record):
    """Load of a node now. Stall ratios are 0 where the kernel does not report them."""

    stall_ratio: float = Field(
        default=0.0, description="share of time tasks waited for processor, memory or disk"
    )
    memory_stall_ratio: float = 0.0
    load_per_cpu: float = 0.0
    used: Resources = Resources()


class NodeReport(Record):
    """Heartbeat of a node."""

    node_id: str
    pressure: Pressure
    boxes: frozenset[str] = frozenset()
    counted_at_seconds: float = Field(
        default=0.0, description="scheduler's time at which the count was asked for"
    )


class StartBox(Record):
    """Order to a node: start a box and say when it is up."""

    box_id: str
    node_id: str
    template: str


class StopBox(Record):
    """Order to a node: end a box. Done again does no harm."""

    box_id: str
    node_id: str


class Granted(Record):
    """Notice: the request has its box."""

    request_id: str
    box_id: str
    node_id: str


class Refused(Record):
    """Notice: the request ends without a box. The holder may ask again."""

    request_id: str
    reason: str


class LeaseEnded(Record):
    """Notice: a lease ended and not by its holder's wish."""

    request_id: str
    was_expired: bool = Field(description="True: not renewed in time. False: its box was lost")


Order = StartBox | StopBox
Notice = Granted | Refused | LeaseEnded
