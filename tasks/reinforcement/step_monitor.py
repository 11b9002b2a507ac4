"""Alarms about a step, written to the log and to the ledger while the run goes on.

`StepMonitor`: it feeds the hack monitor and the parity monitor of one run. It stops nothing.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from ostinato.infra.platform.ledger.events import EventRepository
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.serving.engine.parity import Mismatch as EngineMismatch
from ostinato.infra.serving.engine.parity import ParityAlarm, ParityMonitor
from ostinato.tasks.grading.alarms import HackMonitor
from ostinato.tasks.learning.report import Mismatch, StepReport
from ostinato.tasks.records import Group

logger = logging.getLogger(__name__)

HACK_ALARM = "hack_alarm"
PARITY_ALARM = "parity_alarm"


class StepMonitor:
    """Hack monitor and parity monitor of one run."""

    def __init__(
        self,
        run_id: str,
        events: EventRepository,
        hacks: HackMonitor,
        parity: ParityMonitor,
        wall_clock: Callable[[], float],
    ) -> None:
        self._run_id, self._events, self._wall_clock = run_id, events, wall_clock
        self.hacks = hacks
        self._parity = parity
        self._parity_alarm: ParityAlarm | None = None

    def observe(self, groups: Sequence[Group], report: StepReport) -> None:
        """Judges a step. A hack alarm is told when it begins, a parity alarm at every step."""
        self._watch_hacks(groups, report.step)
        self._watch_parity(report)

    def alarms(self) -> list[str]:
        """Standing alarms in words: hack alarms, and the last step's parity alarm."""
        words = [str(alarm) for alarm in self.hacks.alarms()]
        alarm = self._parity_alarm
        if alarm is not None:
            limit = f"(limit {alarm.alarm_k3:g})"
            words.append(f"parity k3 {alarm.k3:.3g} {limit}: step {alarm.step}")
        return words

    def _watch_hacks(self, groups: Sequence[Group], step: int) -> None:
        self.hacks.observe(member for group in groups for member in group.trajectories)
        for alarm in self.hacks.new_alarms():
            logger.warning("hack alarm %s", fields(run=self._run_id, alarm=alarm))
            payload = {"step": step, **dataclasses.asdict(alarm)}
            self._events.add(self._run_id, HACK_ALARM, payload, self._wall_clock())

    def _watch_parity(self, report: StepReport) -> None:
        told = report.mismatch_without_replay
        alarm = self._parity.judge(
            report.step,
            _engine_mismatch(report.mismatch_equal_version),
            None if told is None else _engine_mismatch(told),
        )
        self._parity_alarm = alarm
        if alarm is not None:
            payload = dataclasses.asdict(alarm)
            self._events.add(self._run_id, PARITY_ALARM, payload, self._wall_clock())


def _engine_mismatch(told: Mismatch) -> EngineMismatch:
    return EngineMismatch(
        tokens=told.tokens,
        k1=told.k1_nats,
        k3=told.k3_nats,
        p99_ratio=told.p99_ratio,
        max_ratio=told.max_ratio,
    )
