"""Placement of a trainer's ranks on the machines of a Ray cluster: one bundle per rank in a placement
group, and the network interface they meet on.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ostinato.infra.platform.errors import ClusterError

Placement = PlacementGroup  # for modules that may not import Ray

PLACEMENT_SECONDS = 300.0  # for a machine that comes back, or that an autoscaler adds


def reserve_ranks(
    num_ranks: int, device: Literal["cpu", "cuda"], wait_seconds: float = PLACEMENT_SECONDS
) -> Placement:
    """Reserves a core per rank, and a GPU per rank for cuda, on as few machines as possible, until this process ends.
    ClusterError when there is no room within `wait_seconds`.
    """
    bundle = {"CPU": 1.0} if device == "cpu" else {"CPU": 1.0, "GPU": 1.0}
    group = placement_group([bundle] * num_ranks, strategy="PACK")
    if not group.wait(wait_seconds):
        seen = _describe_cluster()
        remove_placement_group(group)
        raise ClusterError(
            f"no room for {num_ranks} trainer ranks within {wait_seconds:.0f} s: wanted {num_ranks} bundles of "
            f"{_describe(bundle)}, the cluster has {seen}; add machines or take fewer ranks (world_size)"
        )
    return group


def release_ranks(group: Placement) -> None:
    """Ends a reservation and the actors that still run in it."""
    remove_placement_group(group)


def rank_options(group: Placement, rank: int) -> dict[str, Any]:
    """Options of the actor of one rank."""
    bundle = group.bundle_specs[rank]
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank),
    }


def shared_core_options() -> dict[str, Any]:
    """Options of the actor of a single rank that stays on this machine and has no core of its own."""
    here = ray.get_runtime_context().get_node_id()
    return {
        "num_cpus": 0,
        "memory": 1,  # byte; Ray places an actor without resource needs at random
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }


def cluster_gpus() -> int:
    """GPUs of all machines of the cluster that this process has joined."""
    return int(ray.cluster_resources().get("GPU", 0))


def bind_gloo_interface() -> str:
    """This machine's address in its cluster. Also sets gloo's interface to the one with that address, because gloo
    by default takes the address that the host name resolves to.
    """
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address == address for item in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
    return address


def _describe_cluster() -> str:
    """The machines with their resources, and the free resources of all machines together."""
    nodes = [
        f"{node['NodeManagerAddress']} ({_describe(node['Resources'])})"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return f"{', '.join(nodes)}, of which {_describe(ray.available_resources())} are free"


def _describe(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
