"""Child entry of reinforcement learning: joins trainer, engines, rollout workers, journal and
orchestrator into one run.

Each step marks its groups as trained, takes the optimiser step, publishes the weights and saves a
checkpoint. The engines apply the new version while groups of the next step are being collected.
After a kill the run resumes from the newest step checkpoint: groups that this checkpoint has not
seen are trained again, and no other group is trained twice.
"""

import asyncio
import logging
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_fixed,
)

from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
from ostinato.infra.platform.cluster.workspace import METRICS, Workspace
from ostinato.infra.platform.errors import EngineError, ProblemError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.telemetry import configure_logging, fields, read_metrics
from ostinato.tasks.evaluation.statistics import mean
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.reinforcement.evaluation import OnlineEvaluation, open_evaluation
from ostinato.tasks.reinforcement.learning.actor import Publication
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult
from ostinato.tasks.reinforcement.reporting import RunReporter
from ostinato.tasks.reinforcement.services import RunServices, chain_id_of, open_services
from ostinato.tasks.reinforcement.step_samples import StepSamples
from ostinato.tasks.rollout.attempted_problems import choose_attempted
from ostinato.tasks.rollout.curriculum import GroupHistory
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.orchestrator import Limits, Orchestrator
from ostinato.tasks.rollout.probes import open_curriculum
from ostinato.tasks.rollout.steps import RunProgress, StepRequest

logger = logging.getLogger(__name__)

UPDATE_SECONDS = 900.0  # a replica that died is back in 10 seconds on idle cores; a large model loads for minutes
ENDS_STEPS = 5  # the result holds the mean solve rate of this many first and last steps


def main(request: ReinforcementRequest, workspace: Workspace) -> ReinforcementResult:
    """Runs up to the step or time limit. A second call continues an interrupted run."""
    configure_logging()
    settings = workspace.settings
    start_ray(settings.cpu_limit, settings.object_store_memory_bytes, settings.ray_address)
    try:
        return asyncio.run(run(request, workspace))
    finally:
        stop_ray()


async def run(request: ReinforcementRequest, workspace: Workspace) -> ReinforcementResult:
    """Starts the services, trains up to a limit, and ends the services."""
    objects = open_object_store(workspace.settings)
    ledger = open_ledger(workspace.settings)
    reporter = RunReporter(request, workspace, ledger)
    journal = RolloutJournal(ledger.journal, objects, request.run_id)
    reporter.start()
    async with (
        open_services(request, workspace, objects) as services,
        open_evaluation(request, workspace.directory, services.evaluation, objects) as evaluation,
    ):
        versions = await services.engines.follow(objects, chain_id_of(request))
        loop = TrainingLoop(request, workspace, services, journal, reporter, evaluation)
        orchestrator = loop.make_orchestrator(min(v for v in versions if v is not None))
        await services.workers.open()
        background = [
            orchestrator.start_background(
                reporter.report_status(orchestrator, services.engines, services.workers)
            ),
            orchestrator.start_background(loop.update_engines()),
        ]
        try:
            await orchestrator.run()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        return await loop.finish()


@dataclass(slots=True)
class TrainingLoop:
    """Orchestrator of one run, with the training, publishing and reporting that its steps trigger."""

    request: ReinforcementRequest
    workspace: Workspace
    services: RunServices
    journal: RolloutJournal
    reporter: RunReporter
    evaluation: OnlineEvaluation | None
    _orchestrator: Orchestrator = field(init=False)
    _samples: StepSamples = field(init=False)
    _wanted_version: int = -1
    _version_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._samples = StepSamples(self.request)

    def make_orchestrator(self, engine_version: int) -> Orchestrator:
        """The orchestrator in the state that the last process left: journal, curriculum, time used."""
        request, status = self.request, self.services.trainer_status
        problems = load_problems(Path(request.problems_directory), request.split)
        if not problems:
            raise ProblemError(
                f"{request.problems_directory} holds 0 problems of split {request.split}, "
                "wanted at least 1"
            )
        problems = choose_attempted(problems, request.harness, request.sandboxes)
        curriculum = open_curriculum(problems, request.rollout, request.probes_directory)
        self.reporter.restore_step(status.step, status.weight_version)
        history = GroupHistory(self.workspace.directory / "groups.jsonl")
        untrained = self.journal.restore(status.step)
        history.replay(curriculum, self.journal.committed())
        curriculum.resume(self.journal.drawn())
        orchestrator = self._orchestrator = Orchestrator(
            request.run_id,
            request.rollout,
            curriculum=curriculum,
            journal=self.journal,
            attempt=self.services.workers.attempt,
            train=self._train,
            limits=Limits(request.max_steps, request.budget_seconds, self.reporter.used_seconds),
            progress=RunProgress(
                steps_done=status.step,
                trainer_version=status.weight_version,
                engine_version=engine_version,
                groups_started=curriculum.draws,
            ),
        )
        for item in untrained:
            orchestrator.table.restore(item.group, status.renumber(item.birth_version))
        orchestrator.on_group = history.append
        if self.evaluation is not None:
            self.evaluation.resume(status.step)
            self.evaluation.offer(status.step, status.weight_version)
        logger.info(
            "run begins %s",
            fields(
                run=request.run_id,
                step=status.step,
                version=status.weight_version,
                untrained_groups=len(untrained),
                problems=len(problems),
            ),
        )
        return orchestrator

    async def update_engines(self) -> None:
        """Updates the engines to each new version while they generate. Ray restarts a replica that died, so a failed
        update is retried for `UPDATE_SECONDS`.
        """
        while True:
            await self._version_changed.wait()
            self._version_changed.clear()
            version = self._wanted_version
            async for trial in AsyncRetrying(
                retry=retry_if_exception_type(EngineError),
                wait=wait_fixed(1.0),
                stop=stop_after_delay(UPDATE_SECONDS),
                before_sleep=_note_late_update,
                reraise=True,
            ):
                with trial:
                    await self.services.engines.update_to(version)
            self._orchestrator.engine_applied(version)

    async def finish(self) -> ReinforcementResult:
        """Saves a last step checkpoint and copies it to `checkpoint` in the run's workspace."""
        self.reporter.end()
        self.journal.release()
        progress = self._orchestrator.progress
        saved = await asyncio.to_thread(self.services.trainer.save)
        final = self.workspace.directory / "checkpoint"
        shutil.rmtree(final, ignore_errors=True)
        shutil.copytree(Path(saved.checkpoint_directory), final)
        rates = [
            float(row["solve_rate"]) for row in read_metrics(self.workspace.directory / METRICS)
        ]
        watch = self.reporter.watch
        evaluations = () if self.evaluation is None else await self.evaluation.finish()
        return ReinforcementResult(
            checkpoint_directory=str(final),
            steps=progress.steps_done,
            weight_version=progress.trainer_version,
            used_seconds=self.reporter.finish(self._orchestrator),
            ended_by=self._limit_reached(),
            trajectories=self.journal.counts(),
            outcomes=dict(self._orchestrator.table.outcomes),
            solve_rate_first=mean(rates[:ENDS_STEPS]),
            solve_rate_last=mean(rates[-ENDS_STEPS:]),
            hack_rates={name.value: rate for name, rate in watch.hacks.rates().items() if rate},
            hack_any_ratio=watch.hacks.metrics()["hack_any_ratio"],
            alarms=tuple(watch.alarms()),
            evaluations=evaluations,
        )

    def _limit_reached(self) -> str:
        if self._orchestrator.progress.steps_done >= self.request.max_steps:
            return "max_steps"
        return "problems" if self._orchestrator.is_drained else "budget_seconds"

    async def _train(self, step: StepRequest) -> int:
        """Takes one step and returns its version. The journal is marked first: a crash then restores the step before."""
        started_at = time.monotonic()
        samples = self._samples.of(step.groups)
        self.journal.mark_trained([group.group_id for group in step.groups], step.step)
        report = await asyncio.to_thread(self.services.trainer.step, samples)
        self.reporter.keep_step(self._orchestrator, step, report)
        published, publish_seconds = await asyncio.to_thread(self._publish_and_save)
        version = published.version
        if self.request.rollout.staleness.updates_engines(step.step):
            self._wanted_version = version
            self._version_changed.set()
        seconds = time.monotonic() - started_at
        measured: dict[str, float] = {}
        if self.evaluation is not None:
            self.evaluation.offer(step.step, version)
            measured = self.evaluation.newest_metrics()
        self.reporter.report_step(
            self._orchestrator,
            step,
            report,
            published,
            train_seconds=seconds,
            publish_seconds=publish_seconds,
            evaluation=measured,
        )
        return version

    def _publish_and_save(self) -> tuple[Publication, float]:
        """Writes the step's checkpoint while the version is uploaded. Returns the seconds of both."""
        began_at = time.monotonic()
        self.services.trainer.start_publish()
        return self.services.trainer.save().publication, time.monotonic() - began_at


def _note_late_update(state: RetryCallState) -> None:
    error = None if state.outcome is None else state.outcome.exception()
    logger.warning("engines have not applied the new version yet %s", fields(error=error))
