"""Alarms about a step, written to the log and to the ledger while the run goes on."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from ostinato.infra.platform.ledger.repositories import EventRepository
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.grading.cheating.alarms import HackMonitor
from ostinato.tasks.records import Group
from ostinato.tasks.reinforcement.learning.report import Parity, StepReport

logger = logging.getLogger(__name__)

HACK_ALARM = "hack_alarm"
PARITY_ALARM = "parity_alarm"
UNMEASURED_STEPS = 3  # steps in a row without a comparable token that raise an alarm


def describe_parity(parity: Parity) -> str:
    """Parity in words, with its limits, or the words that it was not measured."""
    words = [
        f"parity k3 {found.k3_nats:.3g} (limit {limit:g}) of {found.tokens} tokens, {cache} cache"
        for cache, found, limit in parity.compared()
    ]
    return ", ".join(words) or "parity not measured"


class StepMonitor:
    """Alarms of one run: hack patterns, and missing parity between engine and trainer."""

    def __init__(
        self,
        run_id: str,
        events: EventRepository,
        hacks: HackMonitor,
        wall_clock: Callable[[], float],
    ) -> None:
        self._run_id, self._events, self._wall_clock = run_id, events, wall_clock
        self.hacks = hacks
        self._unmeasured_steps = 0  # in a row, up to the last step
        self._alarming: StepReport | None = None  # last step; None: engine and trainer agreed

    def observe(self, groups: Sequence[Group], report: StepReport) -> None:
        """Checks a step. A hack alarm is logged when it begins, a parity alarm at every step."""
        self._watch_hacks(groups, report.step)
        self._watch_parity(report)

    def alarms(self) -> list[str]:
        """Current alarms in words: hack alarms, and the last step's parity alarm."""
        words = [str(alarm) for alarm in self.hacks.alarms()]
        report = self._alarming
        if report is not None:
            words.append(f"{describe_parity(report.parity)}: step {report.step}")
        if self._unmeasured_steps >= UNMEASURED_STEPS:
            words.append(f"parity was not measured in the last {self._unmeasured_steps} steps")
        return words

    def _watch_hacks(self, groups: Sequence[Group], step: int) -> None:
        self.hacks.observe(member for group in groups for member in group.trajectories)
        for alarm in self.hacks.new_alarms():
            logger.warning("hack alarm %s", fields(run=self._run_id, alarm=alarm))
            payload = {"step": step, **dataclasses.asdict(alarm)}
            self._events.add(self._run_id, HACK_ALARM, payload, self._wall_clock())

    def _watch_parity(self, report: StepReport) -> None:
        """Reports the mismatch without replay too. If only that one is high, routing alone differs
        and replay corrects it. If both are high, something else differs.
        """
        parity, without_replay = report.parity, report.mismatch_without_replay
        is_measured = bool(parity.tokens_by_age)
        self._unmeasured_steps = 0 if is_measured else self._unmeasured_steps + 1
        self._alarming = report if parity.alarms() else None
        for cache, mismatch, limit in parity.alarms():
            payload = {
                "step": report.step,
                "cache": cache,
                "k1": mismatch.k1_nats,
                "k3": mismatch.k3_nats,
                "p99_ratio": mismatch.p99_ratio,
                "tokens": mismatch.tokens,
                "alarm_k3": limit,
                "k3_without_replay": None if without_replay is None else without_replay.k3_nats,
            }
            logger.error("engine and trainer disagree %s", fields(run=self._run_id, **payload))
            self._events.add(self._run_id, PARITY_ALARM, payload, self._wall_clock())
