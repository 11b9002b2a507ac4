"""An RL run that is killed once with everything that it started, after its second step was saved and before the metrics
of that step were written.
"""

import contextlib
import os
import signal
from typing import Any

import psutil

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.tasks.reinforcement import run
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult
from ostinato.tasks.reinforcement.reporting import RunReporter
from ostinato.tasks.rollout.orchestrator import Orchestrator
from ostinato.tasks.rollout.steps import StepRequest

STEP = 2


def main(request: ReinforcementRequest, workspace: Workspace) -> ReinforcementResult:
    """The stage's entry, with a kill in its first process."""
    was_killed = workspace.directory / "was_killed"
    report_step = RunReporter.report_step

    def report_or_die(
        self: RunReporter, orchestrator: Orchestrator, step: StepRequest, *rest: Any, **named: Any
    ) -> None:
        if step.step == STEP and not was_killed.exists():
            was_killed.touch()
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        report_step(self, orchestrator, step, *rest, **named)

    RunReporter.report_step = report_or_die
    return run.main(request, workspace)
