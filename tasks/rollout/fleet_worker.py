"""Rollout workers that use actors of a Ray cluster: engine replicas and a sandbox fleet."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.infra.platform.cluster.actors import find_actor
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.sandbox.fleet.client import FleetClient
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.tasks.rollout.config import WorkerSetup

if TYPE_CHECKING:
    from ostinato.tasks.rollout.worker import RolloutWorker


def build_fleet_worker(
    setup: WorkerSetup, replica_names: Sequence[str], boxes_name: str | None
) -> "RolloutWorker":
    """A worker that uses engine replicas. They are looked up by name, because Ray may restart them.
    `boxes_name`: the sandbox fleet that provides agents' boxes; None: the worker's process makes them.
    """
    # the run's driver imports this module, but not the code that grades and opens boxes
    from ostinato.tasks.rollout.graded_worker import build_worker, token_dialogue  # noqa: PLC0415

    found = {name: find_actor(name) for name in replica_names}
    missing = [name for name, actor in found.items() if actor is None]
    if missing:
        raise ClusterError(f"engine replicas {', '.join(missing)} are not registered, wanted all")
    replicas = {name: actor for name, actor in found.items() if actor is not None}
    boxes = None if boxes_name is None else FleetClient(boxes_name)
    return build_worker(setup, token_dialogue(setup, EngineFleet(replicas)), boxes)
