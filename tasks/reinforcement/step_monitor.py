"""Alarms about a step, written to the log and to the ledger while the run goes on."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from ostinato.infra.platform.ledger.events import EventRepository
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.grading.alarms import HackMonitor
from ostinato.tasks.learning.report import StepReport
from ostinato.tasks.records import Group

logger = logging.getLogger(__name__)

HACK_ALARM = "hack_alarm"
PARITY_ALARM = "parity_alarm"


class StepMonitor:
    """Hack monitor of one run, and its parity between engine and trainer."""

    def __init__(
        self,
        run_id: str,
        events: EventRepository,
        hacks: HackMonitor,
        alarm_k3: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self._run_id, self._events, self._wall_clock = run_id, events, wall_clock
        self.hacks = hacks
        self._alarm_k3 = alarm_k3
        self._alarming: StepReport | None = (
            None  # the last step, where engine and trainer disagreed
        )

    def observe(self, groups: Sequence[Group], report: StepReport) -> None:
        """Judges a step. A hack alarm is told when it begins, a parity alarm at every step."""
        self._watch_hacks(groups, report.step)
        self._watch_parity(report)

    def alarms(self) -> list[str]:
        """Standing alarms in words: hack alarms, and the last step's parity alarm."""
        words = [str(alarm) for alarm in self.hacks.alarms()]
        report = self._alarming
        if report is not None:
            k3 = f"{report.mismatch_equal_version.k3_nats:.3g}"
            words.append(f"parity k3 {k3} (limit {self._alarm_k3:g}): step {report.step}")
        return words

    def _watch_hacks(self, groups: Sequence[Group], step: int) -> None:
        self.hacks.observe(member for group in groups for member in group.trajectories)
        for alarm in self.hacks.new_alarms():
            logger.warning("hack alarm %s", fields(run=self._run_id, alarm=alarm))
            payload = {"step": step, **dataclasses.asdict(alarm)}
            self._events.add(self._run_id, HACK_ALARM, payload, self._wall_clock())

    def _watch_parity(self, report: StepReport) -> None:
        """The mismatch without replay is told along: when it alone is high, routing differs and replay
        does its work; when both are, something else does.
        """
        self._alarming = report if report.is_mismatch_alarming else None
        if self._alarming is None:
            return
        mismatch, live = report.mismatch_equal_version, report.mismatch_without_replay
        payload = {
            "step": report.step,
            "k1": mismatch.k1_nats,
            "k3": mismatch.k3_nats,
            "p99_ratio": mismatch.p99_ratio,
            "tokens": mismatch.tokens,
            "alarm_k3": self._alarm_k3,
            "k3_without_replay": None if live is None else live.k3_nats,
        }
        logger.error("engine and trainer disagree %s", fields(run=self._run_id, **payload))
        self._events.add(self._run_id, PARITY_ALARM, payload, self._wall_clock())
