"""The numbers of a fleet: bounds of lines, patience with nodes and starts, warm pools.

The numbers of placement are in placement.py.
"""

from collections.abc import Mapping

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.fleet.placement import PlacementPolicy
from ostinato.infra.sandbox.fleet.records import Priority


class FleetPolicy(Record):
    """Numbers of a fleet."""

    placement: PlacementPolicy = PlacementPolicy()
    most_waiting: Mapping[Priority, int] = Field(
        default=dict.fromkeys(Priority, 100_000),
        description="requests of a priority that may wait; more are refused at once",
    )
    node_silence_seconds: float = Field(
        default=10.0, gt=0, description="a node not heard of for so long is lost"
    )
    start_seconds: float = Field(default=30.0, gt=0, description="a start that takes longer failed")
    num_start_tries: int = Field(default=3, ge=1)
    stop_repeat_seconds: float = Field(
        default=5.0, gt=0, description="a box still seen so long after its stop is told again"
    )
    warm_interval_seconds: float = Field(default=1.0, gt=0)
    demand_half_life_seconds: float = Field(default=30.0, gt=0)
