"""Reports of a running run: the metrics of each step, `status.json`, alarms."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ostinato.infra.platform.cluster.stage_status import (
    BlockedOn,
    BoxUse,
    DecodingActivity,
    StageStatus,
)
from ostinato.infra.platform.cluster.workspace import METRICS, STATUS, Workspace, replace_text
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.record import finite
from ostinato.infra.platform.telemetry import read_lines, read_metrics
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.tasks.grading.cheating.alarms import HackMonitor
from ostinato.tasks.reinforcement.learning.actor import Publication
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.records import ReinforcementRequest
from ostinato.tasks.reinforcement.step_metrics import EngineTotals, describe_groups
from ostinato.tasks.reinforcement.step_monitor import StepMonitor, describe_parity
from ostinato.tasks.rollout.actor import RolloutFleet
from ostinato.tasks.rollout.orchestrator import Orchestrator
from ostinato.tasks.rollout.steps import StepRequest

logger = logging.getLogger(__name__)
KEPT_STEP = "kept_step.json"  # metrics of the step that is being saved


class RunReporter:
    """Metrics, status and alarms of one run."""

    def __init__(self, request: ReinforcementRequest, workspace: Workspace, ledger: Ledger) -> None:
        self._request = request
        self._workspace = workspace
        # up to the last finished step, including earlier processes
        self.used_seconds = max(
            (float(row["used_seconds"]) for row in read_metrics(workspace.directory / METRICS)),
            default=0.0,
        )
        self._engine_totals = EngineTotals()
        self.watch = StepMonitor(
            request.run_id,
            ledger.events,
            HackMonitor(request.grading.monitor),
            time.time,
        )
        self._step_ended_at = 0.0
        self._generation: DecodingActivity | None = None
        self._boxes: BoxUse | None = None

    def start(self) -> None:
        self._write_status("starting")

    def keep_step(self, orchestrator: Orchestrator, step: StepRequest, report: StepReport) -> None:
        """Keeps the metrics of a step that is about to be saved, since a kill can come before its line is written."""
        row = {
            **report.metrics(),
            **describe_groups(step.groups),
            **step.metrics,
            "used_seconds": orchestrator.used_seconds(asyncio.get_running_loop().time()),
            "step": step.step,
        }
        replace_text(self._workspace.directory / KEPT_STEP, json.dumps(finite(row)))

    def restore_step(self, saved_step: int, version: int) -> None:
        """Writes the line of the last saved step if a kill prevented that, without what is known only after a publish."""
        rows = read_metrics(self._workspace.directory / METRICS)
        kept = read_lines(self._workspace.directory / KEPT_STEP)
        newest = int(rows[-1]["step"]) if rows else 0
        if not kept or kept[0].pop("step") != saved_step or newest >= saved_step:
            return
        message = f"step {saved_step} v{version}, its metrics restored after a kill"
        logger.info("%s", message)
        row = kept[0] | {"version": version}
        self._workspace.progress.update(saved_step, self._request.max_steps, message, **row)
        self.used_seconds = max(self.used_seconds, float(row["used_seconds"]))

    def end(self) -> None:
        """Sets the status for the time after the last step, while the result is being saved."""
        self._write_status("saving")

    def finish(self, orchestrator: Orchestrator) -> float:
        """Sets the status of a finished run. Returns the seconds it used."""
        used = orchestrator.used_seconds(asyncio.get_running_loop().time())
        self._write_status("finished", steps_done=orchestrator.progress.steps_done)
        return used

    def report_step(
        self,
        orchestrator: Orchestrator,
        step: StepRequest,
        report: StepReport,
        published: Publication,
        *,
        train_seconds: float,
        publish_seconds: float,
        evaluation: Mapping[str, float],
    ) -> None:
        """Writes the metrics of a finished step, together with those of the newest evaluation."""
        loop_now = asyncio.get_running_loop().time()
        now = time.monotonic()
        used = orchestrator.used_seconds(loop_now)
        rows: Mapping[str, float] = describe_groups(step.groups)
        self.watch.observe(step.groups, report)
        progress = orchestrator.progress
        run_seconds = max(1e-9, loop_now - progress.started_at)
        metrics: dict[str, float | int | str] = {
            **report.metrics(),
            **rows,
            **step.metrics,
            **self.watch.hacks.metrics(),
            **self._engine_totals.since_last_step(),
            **evaluation,
            "version": published.version,
            "delta_density": published.density_ratio,
            "published_bytes": published.stored_bytes,
            "train_seconds": train_seconds,
            "publish_seconds": publish_seconds,
            "step_seconds": now - self._step_ended_at if self._step_ended_at else train_seconds,
            "used_seconds": used,
            "slot_busy_ratio": orchestrator.attempts.busy_seconds
            / run_seconds
            / self._request.rollout.concurrent_trajectories,
            "trainer_idle_ratio": progress.trainer_idle_seconds / run_seconds,
        }
        metrics.pop("step", None)
        self._step_ended_at = now
        message = (
            f"step {step.step} v{published.version} solve {rows['solve_rate']:.2f} "
            f"reward {rows['reward_mean']:.2f} tokens {rows['generated_tokens_mean']:.0f} "
            f"stale {step.metrics['staleness_mean']:.1f} {describe_parity(report.parity)} "
            f"{metrics['step_seconds']:.1f}s"
        )
        logger.info("%s", message)
        self._workspace.progress.update(step.step, self._request.max_steps, message, **metrics)

    async def report_status(
        self, orchestrator: Orchestrator, engines: EngineFleet, workers: RolloutFleet
    ) -> None:
        """Writes the status every second until cancelled: which part waits, and for what. Engines
        and workers that do not answer do not delay it.
        """
        await asyncio.gather(
            self._write_each_second(orchestrator, engines),
            self._watch_engines(orchestrator, engines),
            self._watch_boxes(workers),
        )

    async def _write_each_second(self, orchestrator: Orchestrator, engines: EngineFleet) -> None:
        loop = asyncio.get_running_loop()
        behind_since = None
        while True:
            progress = orchestrator.progress
            lag = progress.trainer_version - progress.engine_version
            is_behind = lag >= self._request.rollout.staleness.update_interval_steps
            behind_since = (behind_since or time.time()) if is_behind else None
            status = StageStatus(
                phase="running",
                at=time.time(),
                waits=_waits(orchestrator, loop.time(), time.time(), behind_since),
                replicas=engines.replica_status(),
                generation=self._generation,
                boxes=self._boxes,
                numbers={
                    "run": self._request.run_id,
                    "steps_done": progress.steps_done,
                    "weight_version": progress.trainer_version,
                    "outcomes": dict(orchestrator.table.outcomes),
                    "alarms": self.watch.alarms(),
                },
            )
            replace_text(self._workspace.directory / STATUS, status.model_dump_json(indent=1))
            await asyncio.sleep(1.0)

    async def _watch_engines(self, orchestrator: Orchestrator, engines: EngineFleet) -> None:
        while True:
            # a dead engine is reported by the attempts that ask it for tokens
            with contextlib.suppress(EngineError):
                totals = await engines.statistics()
                self._engine_totals.update(totals)
                computed = sum(
                    numbers.get("generated_tokens", 0.0) + numbers.get("prefill_tokens", 0.0)
                    for numbers in totals.values()
                )
                in_flight = orchestrator.attempts.num_running
                before = self._generation
                is_unchanged = (
                    in_flight and before is not None and before.computed_tokens == computed
                )
                self._generation = DecodingActivity(
                    computed_tokens=computed,
                    since=before.since if is_unchanged and before is not None else time.time(),
                    attempts_in_flight=in_flight,
                )
            await asyncio.sleep(1.0)

    async def _watch_boxes(self, workers: RolloutFleet) -> None:
        while True:
            self._boxes = await workers.boxes()
            await asyncio.sleep(1.0)

    def _write_status(self, phase: str, **numbers: Any) -> None:
        status = StageStatus(
            phase=phase, at=time.time(), numbers={"run": self._request.run_id, **numbers}
        )
        replace_text(self._workspace.directory / STATUS, status.model_dump_json(indent=1))


def _waits(
    orchestrator: Orchestrator, now: float, wall: float, behind_since: float | None
) -> dict[str, BlockedOn]:
    progress = orchestrator.progress
    waits = {
        part: BlockedOn(what=wait.what, detail=wait.detail, since=wall - (now - wait.since_seconds))
        for part, wait in progress.waits.items()
    }
    if behind_since is not None:
        waits["engines"] = BlockedOn(
            what=f"weight version {progress.trainer_version}",
            detail=f"serving {progress.engine_version}",
            since=behind_since,
        )
    return waits
