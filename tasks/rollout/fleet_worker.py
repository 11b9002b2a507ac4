"""Rollout workers over what a Ray cluster holds: engine replicas, and boxes of a sandbox fleet."""

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
    """A worker over engine replicas, which are looked up by name: they may start again. `boxes_name`: the
    sandbox fleet that agents' boxes come from; None: boxes of the worker's process.
    """
    # the run's own process only names this function; it neither grades nor opens boxes
    from ostinato.tasks.rollout.graded_worker import build_worker, token_dialogue  # noqa: PLC0415

    found = {name: find_actor(name) for name in replica_names}
    missing = [name for name, actor in found.items() if actor is None]
    if missing:
        raise ClusterError(f"engine replicas {', '.join(missing)} are not registered, wanted all")
    replicas = {name: actor for name, actor in found.items() if actor is not None}
    boxes = None if boxes_name is None else FleetClient(boxes_name)
    return build_worker(setup, token_dialogue(setup, EngineFleet(replicas)), boxes)
