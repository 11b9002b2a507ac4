"""A fleet whose boxes are repositories to work in, over all machines of the Ray cluster.

What was done in a lost box is gone with it, so the attempt that had it is told and tried again.
Tests are not run here.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import psutil
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ostinato.infra.platform.cluster.actors import (
    end_actor,
    get_or_create_actor,
    live_nodes,
    this_node,
)
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.backends import SandboxKind
from ostinato.infra.sandbox.fleet.actor import FleetActor, SandboxNodeActor, ask, name_node
from ostinato.infra.sandbox.fleet.node import RepositoryBoxes
from ostinato.infra.sandbox.fleet.records import FleetPolicy, NodeSpec, Resources, Template
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)

# What is counted for a box when machines are filled. An agent's box mostly waits for the model; what
# it may use at most is its limits' to say, and the sum of those would leave machines empty. Live
# pressure is looked at beside it.
BOX_SHARE = Resources(cpus=0.1, memory_bytes=64 << 20, disk_bytes=16 << 20)
_END_SECONDS = 30.0
_MAX_CONCURRENCY = 10_000  # coroutines of one actor: who waits costs nothing


class RepositoryFleet:
    """A running fleet, as its owner sees it."""

    def __init__(self, name: str, fleet: ActorHandle, nodes: Iterable[ActorHandle]) -> None:
        self.name = name
        self.actor = fleet
        self._nodes = tuple(nodes)

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
        machines = live_nodes()
        nodes = {
            NodeSpec(node_id=f"machine{index}", capacity=await _measure(machine, writable)): machine
            for index, machine in enumerate(machines)
        }
        templates = [
            Template(name=template, declared=BOX_SHARE, warm_maximum=warm_boxes)
            for template in by_name
        ]
        make_boxes = partial(RepositoryBoxes, by_name, limits, kind)
        policy = policy or FleetPolicy(start_seconds=limits.start_seconds)
        return await cls.start_on(
            nodes, name, templates, make_boxes, writable=writable, policy=policy
        )

    @classmethod
    async def start_on(
        cls,
        nodes: Mapping[NodeSpec, str | None],
        name: str,
        templates: Iterable[Template],
        make_boxes: Callable[[], RepositoryBoxes],
        *,
        writable: Path,
        policy: FleetPolicy,
    ) -> "RepositoryFleet":
        """Start (or find) a fleet and its nodes, each on the machine of this Ray id (None: any). A
        node whose process dies is started again, empty.
        """
        handles = [
            get_or_create_actor(
                SandboxNodeActor,
                name_node(name, spec.node_id),
                spec,
                make_boxes,
                writable,
                max_concurrency=_MAX_CONCURRENCY,
                max_restarts=-1,
                on_node=machine,
            )
            for spec, machine in nodes.items()
        ]
        fleet = get_or_create_actor(
            FleetActor,
            name,
            tuple(templates),
            policy,
            list(zip(nodes, handles, strict=True)),
            max_concurrency=_MAX_CONCURRENCY,
            on_node=this_node(),
        )
        await ask(fleet.start.remote(), f"start of fleet {name}")
        return cls(name, fleet, handles)

    async def close(self) -> None:
        """End the fleet, its nodes and their boxes."""
        end_actor(self.actor)
        for node in self._nodes:
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await ask(node.close.remote(), f"end of a node of {self.name}")
            except (ClusterError, TimeoutError) as error:  # its boxes end with its process
                _logger.info("node did not end %s", fields(fleet=self.name, error=repr(error)))
            end_actor(node)


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
