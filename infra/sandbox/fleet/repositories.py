"""A fleet of boxes with repositories to work in, over all machines of the Ray cluster.

The work in a lost box is lost: its attempt gets SandboxLost and is run again. Test servers are not
part of a fleet.
"""

import asyncio
import logging
from collections.abc import Iterable

from ray.actor import ActorHandle

from ostinato.infra.platform.cluster.actors import ask, end_actor, get_or_create_actor, live_nodes
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.node import BoxNode
from ostinato.infra.sandbox.protocol import SandboxKind, SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
_END_SECONDS = 30.0
_MAX_CONCURRENCY = 10_000  # coroutines of one actor; waiting ones cost nothing


def start_node(
    fleet_name: str,
    machine: str,
    index: int,
    repositories: Iterable[PreparedRepository],
    limits: SandboxLimits,
    kind: SandboxKind = SandboxKind.NAMESPACE,
    most_boxes: int | None = None,
) -> ActorHandle:
    """The fleet's node on the machine of this Ray id, found or started. It starts again, empty, when its
    process dies, and its boxes die with it.
    """
    return get_or_create_actor(
        BoxNode,
        f"{fleet_name}-machine{index}",
        {repository.name: repository for repository in repositories},
        limits,
        kind,
        most_boxes,
        max_concurrency=_MAX_CONCURRENCY,
        max_restarts=-1,
        on_node=machine,
    )


class RepositoryFleet:
    """A running fleet, as its owner sees it."""

    def __init__(self, name: str, nodes: Iterable[ActorHandle]) -> None:
        self.name = name
        self._nodes = tuple(nodes)

    @classmethod
    async def start(
        cls,
        name: str,
        repositories: Iterable[PreparedRepository],
        limits: SandboxLimits,
        kind: SandboxKind = SandboxKind.NAMESPACE,
    ) -> "RepositoryFleet":
        """A node on every machine of the cluster, each answering."""
        repositories = tuple(repositories)
        nodes = [
            start_node(name, machine, index, repositories, limits, kind)
            for index, machine in enumerate(live_nodes())
        ]
        loads = [ask(node.load.remote(), f"a node of {name}", _START_SECONDS) for node in nodes]
        await asyncio.gather(*loads)
        return cls(name, nodes)

    async def close(self) -> None:
        """Ends the nodes and their boxes."""
        for node in self._nodes:
            try:
                await ask(node.close.remote(), f"end of a node of {self.name}", _END_SECONDS)
            except ClusterError as error:  # its boxes end with its process
                _logger.info("node did not end %s", fields(fleet=self.name, error=repr(error)))
            end_actor(node)
