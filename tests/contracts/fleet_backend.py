"""Boxes of a real fleet as a sandbox backend, for tests that know backends alone. Ray must run."""

import itertools
import os
from collections.abc import Sequence

from ray.actor import ActorHandle

from ostinato.infra.platform.cluster.actors import ask, end_actor, this_node
from ostinato.infra.platform.errors import InvalidArgument
from ostinato.infra.sandbox.fleet.client import FleetClient, start_node
from ostinato.infra.sandbox.protocol import Sandbox, SandboxSpec, Snapshot
from ostinato.infra.sandbox.repository import PreparedRepository

_SECONDS = 120.0
_numbers = itertools.count()


class FleetBackend:
    """One fleet of one node per repository and limits that specs name. Belongs to one event loop."""

    name = "fleet"
    keeps_memory = False

    def __init__(self) -> None:
        self._fleets: dict[str, tuple[ActorHandle, FleetClient]] = {}

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A leased box with the spec's files laid over its repository."""
        if spec.repository is None:
            raise InvalidArgument(f"spec {spec} names no repository: nodes lend boxes of one")
        key = f"{spec.repository} {spec.limits.model_dump_json()}"
        if key not in self._fleets:
            repository = PreparedRepository.from_directory("held", spec.repository, (), ())
            name = f"fleet-of-tests-{os.getpid()}-{next(_numbers)}"
            node = start_node(name, this_node(), 0, [repository], spec.limits, max_boxes=16)
            await ask(node.load.remote(), f"a node of {name}", _SECONDS)
            self._fleets[key] = (node, FleetClient(name))
        box = await self._fleets[key][1].acquire("held")
        await box.write_files(spec.files)
        return box

    async def fork(self, source: Snapshot | Sandbox, count: int = 1) -> Sequence[Sandbox]:
        """Refused, as a fleet refuses snapshots."""
        raise InvalidArgument(f"fork of {source} into {count}: a fleet keeps no snapshots")

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Refused: there is none."""
        raise InvalidArgument(f"{snapshot}: a fleet keeps none")

    async def close(self) -> None:
        """Gives all boxes back and ends the nodes."""
        for node, client in self._fleets.values():
            await client.close()
            await ask(node.close.remote(), "end of a node", _SECONDS)
            end_actor(node)
