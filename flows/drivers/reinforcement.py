"""Child entry of reinforcement learning: joins trainer, engines, rollout workers, journal and
orchestrator into one run.

The order of start and end, and the step: mark the groups as trained, take the step, publish and
save, let the engines follow while the next step is already collected. Killed at any moment it goes
on from the newest step checkpoint: groups that step has not seen are owed again, all others are
never trained twice. It holds no policy of its own.
"""

import asyncio
import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_fixed,
)

from ostinato.flows.drivers.requests import ReinforcementRequest, ReinforcementResult
from ostinato.flows.drivers.rollout_worker import WorkerSetup, build_fleet_worker
from ostinato.flows.drivers.run_state import RunState, StatusFile
from ostinato.flows.drivers.step_metrics import EngineTotals, describe_groups
from ostinato.flows.drivers.step_watch import StepWatch
from ostinato.infra.platform.cluster.actors import end_actor, get_or_create_actor, wait_for
from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, EngineError, ProblemError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.telemetry import configure_logging, fields, read_metrics
from ostinato.infra.sandbox.fleet.repositories import RepositoryFleet
from ostinato.infra.serving.engine.fleet import EngineFleet, start_replicas
from ostinato.infra.serving.engine.parity import ParityMonitor
from ostinato.models.checkpoint import load_spec
from ostinato.models.decode.config import configure_engine
from ostinato.tasks.grading.alarms import HackMonitor
from ostinato.tasks.learning.actor import TrainedStep, TrainerActor, TrainerStatus
from ostinato.tasks.learning.advantages import make_samples
from ostinato.tasks.learning.config import TrainerRequest
from ostinato.tasks.problem_sets import load_problems, load_repositories
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.actor import RolloutFleet, start_workers
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.history import GroupHistory
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.orchestrator import (
    AttemptRequest,
    Limits,
    Orchestrator,
    Progress,
    StepRequest,
)
from ostinato.tasks.rollout.sandboxes import BOX_LIMITS
from ostinato.tasks.rollout.worker import AttemptTicket

logger = logging.getLogger(__name__)

START_SECONDS = 180.0  # times the trainer's ranks
STEP_SECONDS = 3600.0
UPDATE_SECONDS = 120.0  # a replica that died is back within 10 on an idle machine
ENDS_STEPS = 5  # first and last steps whose solve rate is told in the result


def main(request: ReinforcementRequest, workspace: Workspace) -> ReinforcementResult:
    """Runs to the step or time limit; called again it continues."""
    configure_logging()
    settings = workspace.settings
    start_ray(settings.cpu_limit, settings.object_store_memory_bytes)
    try:
        return asyncio.run(ReinforcementRun(request, workspace).run())
    finally:
        stop_ray()


class ReinforcementRun:
    """One process of a run."""

    def __init__(self, request: ReinforcementRequest, workspace: Workspace) -> None:
        self._request = request
        self._workspace = workspace
        self._objects = open_object_store(workspace.settings)
        self._ledger = Ledger(workspace.settings.ledger_url).migrate()
        self._journal = RolloutJournal(self._ledger.journal, self._objects, request.run_id)
        self._history = GroupHistory(workspace.directory / "groups.jsonl")
        self._state = RunState.load(workspace.directory)
        self._status = StatusFile(workspace.directory, request.run_id)
        self._chain_id = f"chain-{request.run_id}"
        self._engine_totals = EngineTotals()
        self._watch = StepWatch(
            request.run_id,
            self._ledger.events,
            HackMonitor(request.grading.monitor),
            ParityMonitor(request.run_id, request.learning.mismatch_alarm_k3),
            time.time,
        )
        self._wanted_version = -1
        self._version_changed = asyncio.Event()
        self._step_ended_at = 0.0
        self._orchestrator: Orchestrator

    async def run(self) -> ReinforcementResult:
        """Start everything, roll out and train, end everything."""
        request = self._request
        self._status.write("starting", {})
        spec = load_spec(Path(request.checkpoint_directory))
        self._trainer = get_or_create_actor(
            TrainerActor,
            f"{request.run_id}.trainer",
            self._trainer_request(),
            self._objects,
            num_cpus=trainer_cores(request.learning.world_size, self._workspace.settings.cpu_limit),
        )
        replicas = start_replicas(
            spec,
            configure_engine(request.decoding, slots=request.engine_slots),
            [f"{request.run_id}.engine{index}" for index in range(request.engine_replicas)],
            num_cpus=0.0,
            chain=(self._objects, self._chain_id),
        )
        self._engines = EngineFleet(replicas)
        self._fleet = await self._start_fleet()
        workers = start_workers(
            [f"{request.run_id}.rollouts{index}" for index in range(request.rollout_workers)],
            functools.partial(build_fleet_worker, self._worker_setup(), tuple(replicas)),
        )
        self._workers = RolloutFleet(workers, time.time)
        try:
            status: TrainerStatus = await self._ask(
                self._trainer.status.remote(),
                "trainer start",
                START_SECONDS * request.learning.world_size,
            )
            versions = await self._engines.follow(self._objects, self._chain_id)
            self._orchestrator = self._make_orchestrator(status, versions)
            await self._workers.open()
            beside = [
                asyncio.create_task(self._report_status()),
                asyncio.create_task(self._update_engines()),
            ]
            try:
                await self._orchestrator.run()
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
            return await self._finish()
        finally:
            await self._workers.close()
            if self._fleet is not None:
                await self._fleet.close()
            for actor in (self._trainer, *replicas.values()):
                end_actor(actor)

    async def _start_fleet(self) -> RepositoryFleet | None:
        """The run's own sandbox fleet, where the recipe asks for one."""
        request = self._request
        if request.rollout.boxes != "fleet":
            return None
        problems = Path(request.problems_directory)
        names = {problem.repository for problem in load_problems(problems)}
        return await RepositoryFleet.start(
            self._fleet_name,
            load_repositories(problems, names),
            BOX_LIMITS,
            writable=self._workspace.directory,
            warm_boxes=request.rollout.concurrent_trajectories,
        )

    @property
    def _fleet_name(self) -> str:
        return f"{self._request.run_id}.boxes"

    def _make_orchestrator(self, status: TrainerStatus, versions: list[int | None]) -> Orchestrator:
        request = self._request
        problems = load_problems(Path(request.problems_directory), request.split)[
            : request.problems_limit
        ]
        if not problems:
            raise ProblemError(
                f"{request.problems_directory} holds 0 problems of split {request.split}, "
                "wanted at least 1"
            )
        curriculum = Curriculum(
            problems,
            request.rollout.curriculum,
            group_size=request.rollout.group_size,
            seed=request.rollout.seed,
        )
        owed = self._journal.restore(status.step)
        started = self._journal.groups_started()
        self._history.replay(curriculum)
        curriculum.resume(started)
        orchestrator = Orchestrator(
            request.run_id,
            request.rollout,
            curriculum=curriculum,
            journal=self._journal,
            attempt=self._attempt,
            train=self._train,
            limits=Limits(request.max_steps, request.budget_seconds, self._state.used_seconds),
            progress=Progress(
                steps_done=status.step,
                trainer_version=status.weight_version,
                engine_version=min(version for version in versions if version is not None),
                groups_started=started,
            ),
        )
        for item in owed:
            orchestrator.restore(item.group, item.birth_version)
        orchestrator.on_group = self._history.append
        logger.info(
            "run begins %s",
            fields(
                run=request.run_id,
                step=status.step,
                version=status.weight_version,
                owed=len(owed),
                problems=len(problems),
            ),
        )
        return orchestrator

    async def _attempt(self, request: AttemptRequest) -> Trajectory:
        return await self._workers.attempt(
            AttemptTicket(
                trajectory_id=request.trajectory_id,
                group_id=request.group_id,
                problem=request.problem,
                attempt=request.attempt,
                seed=request.seed,
                temperature=self._request.rollout.temperature,
            )
        )

    async def _train(self, step: StepRequest) -> int:
        """One step. The journal is marked first: a crash before the checkpoint is complete restores
        the step before.
        """
        started_at = time.monotonic()
        samples = [sample for group in step.groups for sample in make_samples(group)]
        self._journal.mark_trained([group.group_id for group in step.groups], step.step)
        trained: TrainedStep = await self._ask(
            self._trainer.advance.remote(samples), f"step {step.step}", STEP_SECONDS
        )
        version = trained.publication.version
        self._wanted_version = version
        self._version_changed.set()
        self._write_metrics(step, trained, time.monotonic() - started_at)
        return version

    async def _update_engines(self) -> None:
        """Lets every engine follow the newest version while it generates. A replica that died is
        started again by Ray and tried again here for a while.
        """
        while True:
            await self._version_changed.wait()
            self._version_changed.clear()
            version = self._wanted_version
            try:
                async for trial in AsyncRetrying(
                    retry=retry_if_exception_type(EngineError),
                    wait=wait_fixed(1.0),
                    stop=stop_after_delay(UPDATE_SECONDS),
                    before_sleep=self._note_late_update,
                    reraise=True,
                ):
                    with trial:
                        await self._engines.update_to(version)
            except EngineError as error:
                self._orchestrator.fail(error)
                return
            self._orchestrator.engine_applied(version)

    def _note_late_update(self, state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        logger.warning("engines do not follow yet %s", fields(error=error))

    def _write_metrics(self, step: StepRequest, trained: TrainedStep, train_seconds: float) -> None:
        loop_now = asyncio.get_running_loop().time()
        now = time.monotonic()
        used = self._orchestrator.used_seconds(loop_now)
        self._state.save(used)
        progress = self._orchestrator.progress
        rows: Mapping[str, float] = describe_groups(step.groups)
        self._watch.observe(step.groups, trained.report)
        metrics: dict[str, float | int | str] = {
            **trained.report.metrics(),
            **rows,
            **step.metrics,
            **self._watch.hacks.metrics(),
            **self._engine_totals.since_last_step(),
            "version": trained.publication.version,
            "delta_density": trained.publication.density_ratio,
            "published_bytes": trained.publication.stored_bytes,
            "train_seconds": train_seconds,
            "step_seconds": now - self._step_ended_at if self._step_ended_at else train_seconds,
            "used_seconds": used,
            "slot_busy_ratio": progress.slot_seconds_used
            / max(1e-9, loop_now - progress.started_at)
            / self._request.rollout.concurrent_trajectories,
            "trainer_idle_ratio": progress.trainer_idle_seconds
            / max(1e-9, loop_now - progress.started_at),
        }
        metrics.pop("step", None)
        self._step_ended_at = now
        message = (
            f"step {step.step} v{trained.publication.version} solve {rows['solve_rate']:.2f} "
            f"reward {rows['reward_mean']:.2f} tokens {rows['generated_tokens_mean']:.0f} "
            f"stale {step.metrics['staleness_mean']:.1f} {metrics['step_seconds']:.1f}s"
        )
        logger.info("%s", message)
        self._workspace.progress.update(step.step, self._request.max_steps, message, **metrics)

    async def _report_status(self) -> None:
        """Says every second what waits for what."""
        loop = asyncio.get_running_loop()
        while True:
            now, wall = loop.time(), time.time()
            progress = self._orchestrator.progress
            waits = {
                part: {
                    "for": wait.what,
                    "detail": wait.detail,
                    "since": wall - (now - wait.since_seconds),
                }
                for part, wait in progress.waits.items()
            }
            if progress.engine_version < progress.trainer_version:
                waits["engines"] = {
                    "for": f"weight version {progress.trainer_version}",
                    "detail": f"serving {progress.engine_version}",
                    "since": wall,
                }
            self._status.write(
                "running",
                waits,
                steps_done=progress.steps_done,
                weight_version=progress.trainer_version,
                outcomes=dict(self._orchestrator.table.outcomes),
                alarms=self._watch.alarms(),
            )
            with contextlib.suppress(EngineError):  # who asks it for tokens tells of its death
                self._engine_totals.update(await self._engines.statistics())
            await asyncio.sleep(1.0)

    async def _finish(self) -> ReinforcementResult:
        """Copies the newest step checkpoint, without its optimiser state, to where it stays."""
        self._journal.release()
        progress = self._orchestrator.progress
        saved = Path(await self._ask(self._trainer.save.remote(), "last checkpoint", START_SECONDS))
        final = self._workspace.directory / "checkpoint"
        shutil.rmtree(final, ignore_errors=True)
        shutil.copytree(saved, final, ignore=shutil.ignore_patterns("optimizer.pt"))
        rates = [
            float(row["solve_rate"])
            for row in read_metrics(self._workspace.directory / "metrics.jsonl")
        ]
        used = self._orchestrator.used_seconds(asyncio.get_running_loop().time())
        self._state.save(used)
        self._status.write("finished", {}, steps_done=progress.steps_done)
        return ReinforcementResult(
            checkpoint_directory=str(final),
            steps=progress.steps_done,
            weight_version=progress.trainer_version,
            used_seconds=used,
            trajectories=self._journal.counts(),
            outcomes=dict(self._orchestrator.table.outcomes),
            solve_rate_first=_mean(rates[:ENDS_STEPS]),
            solve_rate_last=_mean(rates[-ENDS_STEPS:]),
            hack_rates={
                name.value: rate for name, rate in self._watch.hacks.rates().items() if rate
            },
            hack_any_ratio=self._watch.hacks.metrics()["hack_any_ratio"],
            alarms=tuple(self._watch.alarms()),
        )

    def _trainer_request(self) -> TrainerRequest:
        request = self._request
        return TrainerRequest(
            config=request.learning,
            checkpoint_directory=request.checkpoint_directory,
            work_directory=str(self._workspace.directory / "steps"),
            chain_id=self._chain_id,
        )

    def _worker_setup(self) -> WorkerSetup:
        request = self._request
        share = -(-request.rollout.concurrent_trajectories // request.rollout_workers)
        return WorkerSetup(
            tokenizer_directory=request.checkpoint_directory,
            problems_directory=request.problems_directory,
            harness=request.harness,
            grading=request.grading,
            concurrent_trajectories=share,
            fleet_name=self._fleet_name if request.rollout.boxes == "fleet" else None,
        )

    async def _ask(self, reference: Any, what: str, limit_seconds: float) -> Any:
        return await asyncio.to_thread(wait_for, reference, what, limit_seconds)


def trainer_cores(world_size: int, cpu_limit: int) -> float:
    """Cores that Ray sets aside for the trainer; one rank shares its core with everything else."""
    if world_size == 1:
        return 0.0
    if world_size > cpu_limit:
        raise ConfigError(
            f"[learning] world_size is {world_size}, wanted at most {cpu_limit}, the cores of this machine "
            "(OSTINATO_CPU_LIMIT): the trainer's ranks are processes of one machine"
        )
    return float(world_size)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
