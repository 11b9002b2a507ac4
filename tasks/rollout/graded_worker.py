"""Rollout workers, made in the process that runs them: where rollout, grading and harness meet."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import load_renderer
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.problems.published import load_repositories
from ostinato.tasks.rollout.config import WorkerSetup
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import Converse, RolloutWorker

if TYPE_CHECKING:  # it needs Ray, which evaluations do without
    from ostinato.infra.sandbox.fleet.client import FleetClient


def token_dialogue(setup: WorkerSetup, model: ModelClient) -> Converse:
    """Attempts in tokens, by the renderer of a checkpoint."""
    return partial(run_agent, model, load_renderer(Path(setup.tokenizer_directory)))


def build_worker(
    setup: WorkerSetup, converse: Converse, fleet: "FleetClient | None" = None
) -> RolloutWorker:
    """A worker on this process's event loop. Its boxes start when first needed; agents' come from `fleet`
    where there is one.
    """
    configure_logging()
    sandboxes = Sandboxes(
        load_repositories(Path(setup.problems_directory)).values(),
        concurrent_trajectories=setup.concurrent_trajectories,
        kind=setup.sandbox,
        fleet=fleet,
    )
    return RolloutWorker(
        converse=converse,
        harness=setup.harness,
        sandboxes=sandboxes,
        grade=make_grader(setup.grading),
        clock=time.time,
        search=SearchService.load(setup.search_directory),
    )
