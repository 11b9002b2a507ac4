"""What is simulated: nodes, what a start costs, who asks for what, and what goes wrong.

Costs have no defaults: they come from a measurement.
"""

from collections.abc import Mapping

from pydantic import Field

from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.records import NodeSpec, Priority, Template
from ostinato.infra.sandbox.protocol import SandboxRecord


class StartCosts(SandboxRecord):
    """What it costs to bring a box up; measured on a real machine."""

    start_cpu_seconds: float = Field(gt=0, description="CPU time of one start, median")
    start_spread: float = Field(ge=0, description="sigma of its log-normal distribution")
    clean_cpu_seconds: float = Field(gt=0, description="CPU time to clean a returned box")
    idle_memory_bytes: int = Field(ge=0, description="of a box in which nothing runs")


class Habits(SandboxRecord):
    """What boxes do with their node once they are up."""

    median_life_seconds: float = 180.0
    life_spread: float = Field(default=0.5, description="sigma of a log-normal distribution")
    peak_seconds: float = Field(default=10.0, description="length of the start-up peak")
    peak_cpus: float = 1.0
    steady_cpus: float = Field(
        default=0.06, description="mean, exponential; agents mostly wait for the model"
    )
    peak_memory_ratio: float = Field(default=0.6, description="of the declared memory")
    steady_memory_ratio: float = Field(
        default=0.3, description="mean of the declared; spread evenly"
    )
    state_bytes: int = Field(default=64 << 20, description="a saved state, when it must be copied")


class Burst(SandboxRecord):
    """Many requests at once, on top of the steady stream."""

    at_seconds: float
    num_requests: int
    priority: Priority = Priority.TRAINING


class NodeLoss(SandboxRecord):
    """Nodes that go silent together and join again, empty, later."""

    at_seconds: float
    num_nodes: int
    away_seconds: float = 60.0


class Workload(SandboxRecord):
    """Who asks for what, and what goes wrong."""

    length_seconds: float
    requests_per_second: float
    priority_shares: Mapping[Priority, float] = Field(
        default={Priority.TRAINING: 0.75, Priority.EVALUATION: 0.15, Priority.VERIFIER: 0.10}
    )
    template_shares: Mapping[str, float] = Field(description="template name -> share of requests")
    fork_share: float = Field(default=0.2, description="share of requests that fork a saved state")
    num_states: int = Field(default=200, description="newest saved states that forks choose from")
    movable_share: float = 0.9
    dead_holder_share: float = Field(
        default=0.01, description="holders that die with their lease, without a word"
    )
    lost_start_share: float = Field(default=0.001, description="starts that never answer")
    lease_seconds: float = 300.0
    wait_seconds: float = 120.0
    bursts: tuple[Burst, ...] = ()
    losses: tuple[NodeLoss, ...] = ()


class Scenario(SandboxRecord):
    """One simulation, save for its seed."""

    name: str
    nodes: tuple[NodeSpec, ...]
    templates: tuple[Template, ...]
    workload: Workload
    costs: StartCosts
    habits: Habits = Habits()
    policy: FleetPolicy = FleetPolicy()
    tick_seconds: float = 0.02
    heartbeat_seconds: float = 2.0
    count_every: int = Field(default=5, description="every so many heartbeats list all boxes")
    message_seconds: float = Field(default=0.001, description="between scheduler and node, one way")
    copy_bytes_per_second: float = Field(default=1.25e9, description="between two nodes")
    copies_at_once: int = Field(default=4, description="per receiving node")
