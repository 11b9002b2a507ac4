"""Evaluation of a run's weight versions while it trains, one version at a time.

The version is pinned on an engine replica that only evaluation uses. An attempt with a token or a
cache key of another version is discarded and repeated.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ostinato.infra.platform.cluster.workspace import read_record, replace_text
from ostinato.infra.platform.errors import OstinatoError, ProblemError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.telemetry import MetricsLog, fields, read_lines
from ostinato.tasks.evaluation.attempts import (
    AttemptFunction,
    draw_problems,
    plan_attempts,
    run_attempts,
)
from ostinato.tasks.evaluation.statistics import scorecard_from
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Outcome, Problem, Scorecard, Trajectory
from ostinato.tasks.reinforcement.records import (
    EvaluationPoint,
    OnlineEvaluationConfig,
    ReinforcementRequest,
)
from ostinato.tasks.reinforcement.services import EvaluationServices, chain_id_of
from ostinato.tasks.rollout.attempted_problems import choose_attempted
from ostinato.tasks.rollout.records import AttemptRequest

logger = logging.getLogger(__name__)

POINTS_FILE = "evaluations.jsonl"
STARTED_FILE = "begun.json"  # step and version of the evaluation that runs now
DIRECTORY = "evaluation"  # in the run's workspace

PinFunction = Callable[[int], Awaitable[object]]


class EvaluationStart(Record):
    """Step and version of an evaluation that has started."""

    step: int
    weight_version: int


class OnlineEvaluation:
    """Evaluations of one run. An evaluation that is due while another runs is recorded as not
    measured. The last of these is made when the run is over.
    """

    def __init__(
        self,
        config: OnlineEvaluationConfig,
        problems: Sequence[Problem],
        *,
        attempt: AttemptFunction,
        pin: PinFunction,
        directory: Path,
        concurrent_attempts: int,
    ) -> None:
        """`pin` makes the replica serve a version. Attempts and points are kept in `directory`."""
        self._config = config
        self._problems = draw_problems(problems, count=config.problems, seed=config.seed)
        self._attempt = attempt
        self._pin = pin
        self._directory = directory
        self._concurrent_attempts = concurrent_attempts
        self._log = MetricsLog(directory / POINTS_FILE)
        self._points = {point.step: point for point in read_points(directory)}
        self._running: asyncio.Task[None] | None = None
        self._running_step = 0
        self._skipped: tuple[int, int] | None = None  # step and version of the newest one skipped

    @property
    def points(self) -> tuple[EvaluationPoint, ...]:
        """Points so far, ordered by step."""
        return tuple(self._points[step] for step in sorted(self._points))

    def offer(self, step: int, version: int) -> None:
        """Starts the evaluation of a step's version if it is due and not measured yet."""
        every = self._config.every_steps
        known = self._points.get(step)
        if every is None or step % every or (known is not None and known.average is not None):
            return
        if self._running is not None:
            if not self._running.done():
                self._note(step, version, reason=f"step {self._running_step} was still evaluated")
                self._skipped = step, version
                return
            self._running.result()
        self._begin(step, version)

    def resume(self, steps_done: int) -> None:
        """Continues the evaluation that ran when an earlier process ended, if there was one."""
        started = read_record(self._directory / STARTED_FILE, EvaluationStart)
        # a step beyond the checkpoint is taken again and then has other weights
        if started is None or started.step > steps_done:
            return
        known = self._points.get(started.step)
        if known is None or known.average is None:
            self._begin(started.step, started.weight_version)

    async def finish(self) -> tuple[EvaluationPoint, ...]:
        """Waits for the running evaluation, then makes the last skipped one. Returns all points, ordered by step."""
        if self._running is not None:
            await self._running
        if self._skipped is not None:
            await self._begin(*self._skipped)
        return self.points

    async def close(self) -> None:
        """Cancels the running evaluation. Its finished attempts are kept."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._log.close()

    def newest_metrics(self) -> dict[str, float]:
        """Metrics of the newest measured point, for a step's row."""
        for point in reversed(self.points):
            if point.average is not None and point.best_of is not None:
                return {
                    "evaluation_step": point.step,
                    "evaluation_average": point.average.mean,
                    "evaluation_average_low": point.average.low,
                    "evaluation_average_high": point.average.high,
                    "evaluation_best_of": point.best_of.mean,
                    "evaluation_best_of_low": point.best_of.low,
                    "evaluation_best_of_high": point.best_of.high,
                    "evaluation_seconds": point.seconds,
                }
        return {}

    def _begin(self, step: int, version: int) -> asyncio.Task[None]:
        started = EvaluationStart(step=step, weight_version=version)
        self._directory.mkdir(parents=True, exist_ok=True)
        replace_text(self._directory / STARTED_FILE, started.model_dump_json())
        self._running_step, self._skipped = step, None
        self._running = asyncio.create_task(self._evaluate(step, version))
        return self._running

    async def _evaluate(self, step: int, version: int) -> None:
        config, began_at = self._config, time.monotonic()
        plan = plan_attempts(
            self._problems,
            attempts_per_problem=config.attempts_per_problem,
            seed=config.seed,
            temperature=config.temperature,
        )
        try:
            await self._pin(version)
            rows = await run_attempts(
                plan,
                self._of_version(version),
                rows_path=self._directory / f"version{version:06d}" / "rows.jsonl",
                concurrent_attempts=self._concurrent_attempts,
            )
        except OstinatoError as error:  # the run goes on without this point
            logger.warning("not evaluated %s", fields(step=step, version=version, error=error))
            self._note(step, version, reason=str(error))
            return
        card = scorecard_from(
            rows,
            suite=config.split.value,
            checkpoint=f"version {version}",
            temperature=config.temperature,
            confidence=config.confidence,
        )
        self._note(step, version, card, seconds=time.monotonic() - began_at)
        logger.info(
            "evaluated %s",
            fields(step=step, version=version, average=card.average.mean, best=card.best_of.mean),
        )

    def _of_version(self, version: int) -> AttemptFunction:
        """Attempt function for one version. Attempts with tokens of another version end as engine failures."""

        async def attempt(request: AttemptRequest) -> Trajectory:
            trajectory = await self._attempt(request)
            others = versions_of(trajectory) - {version}
            if not others and trajectory.outcome is not Outcome.ENGINE_FAILED:
                return trajectory
            await self._pin(version)  # a restarted replica serves nothing or another version
            reason = f"tokens or cache of versions {sorted(others)}, wanted {version}"
            failure = {"outcome": Outcome.ENGINE_FAILED, "reason": reason}
            return trajectory.model_copy(update=failure if others else {})

        return attempt

    def _note(
        self,
        step: int,
        version: int,
        card: Scorecard | None = None,
        *,
        reason: str = "",
        seconds: float = 0.0,
    ) -> None:
        point = EvaluationPoint(
            step=step,
            weight_version=version,
            attempts_per_problem=self._config.attempts_per_problem,
            average=None if card is None else card.average,
            best_of=None if card is None else card.best_of,
            reason=reason,
            seconds=seconds,
        )
        self._points[step] = point
        self._log.append(step, point.model_dump(mode="json", exclude={"step"}))


@asynccontextmanager
async def open_evaluation(
    request: ReinforcementRequest,
    run_directory: Path,
    services: EvaluationServices | None,
    objects: ObjectStore,
) -> AsyncIterator[OnlineEvaluation | None]:
    """Evaluation during a run. None: its recipe asks for none."""
    if services is None:
        yield None
        return
    config = request.evaluation
    problems = load_problems(Path(request.problems_directory), config.split)
    if not problems:
        raise ProblemError(
            f"{request.problems_directory} holds 0 problems of split {config.split}, wanted at least 1 "
            "for [reinforcement.evaluation]"
        )
    problems = choose_attempted(problems, request.harness, request.sandboxes)
    await services.workers.open()
    chain_id = chain_id_of(request)
    evaluation = OnlineEvaluation(
        config,
        problems,
        attempt=services.workers.attempt,
        pin=lambda version: services.engines.follow(objects, chain_id, version),
        directory=run_directory / DIRECTORY,
        concurrent_attempts=request.engine_slots,
    )
    try:
        yield evaluation
    finally:
        await evaluation.close()
        await services.engines.close()


def versions_of(trajectory: Trajectory) -> set[int]:
    """Weight versions that sampled a token of the trajectory or computed a cache key that it read."""
    found: set[int] = set()
    for segment in trajectory.transcript.segments:
        found |= set(segment.weight_versions_T[segment.loss_mask_T].tolist())
        found |= set(segment.cache_versions_T[segment.loss_mask_T].tolist())
    return found


def read_points(directory: Path) -> list[EvaluationPoint]:
    """Points of a run. Of a step recorded several times, only the last record."""
    points = map(EvaluationPoint.model_validate, read_lines(directory / POINTS_FILE))
    return list({point.step: point for point in points}.values())
