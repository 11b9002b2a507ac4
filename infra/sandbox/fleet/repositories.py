"""A fleet whose boxes are repositories to work in, over all machines of the Ray cluster.

What was done in a lost box is gone with it, so the attempt that had it is told and tried again.
Tests are not run here.
"""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ostinato.infra.platform.cluster.actors import end_actor, find_actor
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.backends import SandboxKind
from ostinato.infra.sandbox.fleet.actor import ask, start_fleet
from ostinato.infra.sandbox.fleet.boxes import RepositoryBoxes
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.records import NodeSpec, Resources, Template
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)

# What is counted for a box when machines are filled. An agent's box mostly waits for the model; what
# it may use at most is its limits' to say, and the sum of those would leave machines empty. Live
# pressure is looked at beside it.
BOX_SHARE = Resources(cpus=0.1, memory_bytes=64 << 20, disk_bytes=16 << 20)
_END_SECONDS = 30.0


class RepositoryFleet:
    """A running fleet, as its owner sees it."""

    def __init__(self, name: str, fleet: ActorHandle, node_ids: Iterable[str]) -> None:
        self.name = name
        self._fleet = fleet
        self._node_ids = tuple(node_ids)

    @classmethod
    async def start(
        cls,
        name: str,
        repositories: Iterable[PreparedRepository],
        limits: SandboxLimits,
        *,
        writable: Path,
        warm_boxes: int,
        kind: SandboxKind = SandboxKind.NAMESPACE,
        policy: FleetPolicy | None = None,
    ) -> "RepositoryFleet":
        """A node on every machine of the cluster. Nothing is started before it is asked for; up to
        `warm_boxes` per repository are then kept ready.
        """
        by_name = {repository.name: repository for repository in repositories}
        machines = {
            f"machine{index}": machine
            for index, machine in enumerate(sorted(_machines_of_the_cluster()))
        }
        specs = [
            NodeSpec(node_id=node_id, capacity=await _measure(machine, writable))
            for node_id, machine in machines.items()
        ]
        fleet = await start_fleet(
            name,
            [
                Template(name=template, declared=BOX_SHARE, warm_maximum=warm_boxes)
                for template in by_name
            ],
            specs,
            partial(RepositoryBoxes, by_name, limits, kind),
            writable=writable,
            policy=policy or FleetPolicy(start_seconds=limits.start_seconds),
            machines=machines,
        )
        return cls(name, fleet, machines)

    async def count(self) -> dict[str, int]:
        """Live leases, waiting requests, boxes and nodes."""
        return await ask(self._fleet.count.remote(), f"count of fleet {self.name}")

    async def close(self) -> None:
        """End the fleet, its nodes and their boxes."""
        end_actor(self._fleet)
        for node_id in self._node_ids:
            node = find_actor(f"{self.name}-{node_id}")
            if node is None:
                continue
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await ask(node.close.remote(), f"end of {node_id}")
            except (ClusterError, TimeoutError) as error:  # its boxes end with its process
                _logger.info("node did not end %s", fields(node=node_id, error=repr(error)))
            end_actor(node)


def _machines_of_the_cluster() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


async def _measure(machine: str, writable: Path) -> Resources:
    strategy = NodeAffinitySchedulingStrategy(machine, soft=False)
    task = ray.remote(_read_capacity).options(num_cpus=0, scheduling_strategy=strategy)
    return await ask(task.remote(writable), f"capacity of machine {machine}")


def _read_capacity(writable: Path) -> Resources:
    return Resources(
        cpus=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        disk_bytes=psutil.disk_usage(str(writable)).total,
    )
