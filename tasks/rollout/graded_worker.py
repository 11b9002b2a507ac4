"""Construction of a rollout worker, with harness, boxes and grader, in the process that runs it."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.infra.sandbox.egress.door import Doors
from ostinato.infra.serving.attempts.program import ProgramDialogue
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import load_renderer
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.problems.published import load_repositories
from ostinato.tasks.rollout.config import BOX_LIMITS, WorkerSetup
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import Converse, RolloutWorker

if TYPE_CHECKING:  # it imports Ray, which evaluations do not need
    from ostinato.infra.sandbox.fleet.client import FleetClient


def token_dialogue(setup: WorkerSetup, model: ModelClient) -> Converse:
    """Dialogue in tokens with the renderer of a checkpoint. It is the builtin loop or the program that the settings
    name, which is installed here if it is missing.
    """
    renderer = load_renderer(Path(setup.tokenizer_directory))
    if setup.harness.is_builtin:
        return partial(run_agent, model, renderer)
    return ProgramDialogue(model, renderer, setup.harness)


def build_worker(
    setup: WorkerSetup, converse: Converse, fleet: "FleetClient | None" = None
) -> RolloutWorker:
    """A worker on this process's event loop. Its boxes start when first needed. `fleet` provides agents' boxes;
    None: this process makes them.
    """
    configure_logging()
    limits, mounts, close = BOX_LIMITS, None, None
    if isinstance(converse, ProgramDialogue):
        limits, mounts, close = converse.limits(BOX_LIMITS), converse.mounts, converse.close
    sandboxes = Sandboxes(
        load_repositories(Path(setup.problems_directory)).values(),
        concurrent_trajectories=setup.concurrent_trajectories,
        kind=setup.sandbox,
        fleet=fleet,
        limits=limits,
        mounts=mounts,
        doors=Doors(setup.sandboxes.egress) if setup.sandboxes.egress.allow else None,
    )
    return RolloutWorker(
        converse=converse,
        harness=setup.harness,
        sandboxes=sandboxes,
        grade=make_grader(setup.grading),
        clock=time.time,
        search=SearchService.load(setup.search_directory),
        close_dialogue=close,
    )
