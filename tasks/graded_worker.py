"""Rollout workers, made in the process that runs them: where rollout, grading and harness meet."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.search.service import SearchService
from ostinato.infra.platform.cluster.actors import find_actor
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.infra.sandbox.fleet.client import FleetClient
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import load_renderer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.problem_sets import load_repositories
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import Converse, RolloutWorker


class WorkerSetup(Record):
    """Everything a worker process needs beside a model."""

    tokenizer_directory: str
    problems_directory: str
    harness: HarnessConfig
    grading: GradingConfig
    concurrent_trajectories: int
    search_directory: str | None = None
    """A trained encoder's files; None: codebase_search ranks by words alone."""
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    """What agents' commands run in, in boxes of this process."""
    fleet_name: str | None = None
    """The sandbox fleet that agents' boxes come from; None: boxes of this process."""


def build_fleet_worker(setup: WorkerSetup, replica_names: Sequence[str]) -> RolloutWorker:
    """A worker over engine replicas, which are looked up by name: they may start again."""
    found = {name: find_actor(name) for name in replica_names}
    missing = [name for name, actor in found.items() if actor is None]
    if missing:
        raise ClusterError(f"engine replicas {', '.join(missing)} are not registered, wanted all")
    replicas = {name: actor for name, actor in found.items() if actor is not None}
    return build_worker(setup, token_dialogue(setup, EngineFleet(replicas)))


def token_dialogue(setup: WorkerSetup, model: ModelClient) -> Converse:
    """Attempts in tokens, by the renderer of a checkpoint."""
    return partial(run_agent, model, load_renderer(Path(setup.tokenizer_directory)))


def build_worker(setup: WorkerSetup, converse: Converse) -> RolloutWorker:
    """A worker on this process's event loop. Its boxes start when first needed."""
    configure_logging()
    sandboxes = Sandboxes(
        load_repositories(Path(setup.problems_directory)).values(),
        concurrent_trajectories=setup.concurrent_trajectories,
        kind=setup.sandbox,
        fleet=None if setup.fleet_name is None else FleetClient(setup.fleet_name),
    )
    return RolloutWorker(
        converse=converse,
        harness=setup.harness,
        sandboxes=sandboxes,
        grade=make_grader(setup.grading),
        clock=time.time,
        search=SearchService.load(setup.search_directory),
    )
