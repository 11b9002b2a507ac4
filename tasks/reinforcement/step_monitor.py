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
UNMEASURED_STEPS = 3  # without a comparable token, after which that is an alarm


def describe_parity(parity: Parity) -> str:
    """Parity in words, with its limits. Without a token it says so."""
    words = [
        f"parity k3 {found.k3_nats:.3g} (limit {limit:g}) of {found.tokens} tokens, {cache} cache"
        for cache, found, limit in parity.compared()
    ]
    return ", ".join(words) or "parity not measured"


class StepMonitor:
    """Hack monitor of one run, and its parity between engine and trainer."""

    def __init__(
        self,
        run_id: str,
        events: EventRepository,
        hacks: HackMonitor,
        wall_clock: Callable[[], float],
    ) -> None:
        self._run_id, self._events, self._wall_clock = run_id, events, wall_clock
        self.hacks = hacks
        self._unmeasured_steps = 0  # in a row, up to now
        # the last step, where engine and trainer disagreed
        self._alarming: StepReport | None = None

    def observe(self, groups: Sequence[Group], report: StepReport) -> None:
        """Judges a step. A hack alarm is told when it begins, a parity alarm at every step."""
        self._watch_hacks(groups, report.step)
        self._watch_parity(report)

    def alarms(self) -> list[str]:
        """Standing alarms in words: hack alarms, and the last step's parity alarm."""
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
        """The mismatch without replay is reported too: if it alone is high, only routing differs
        and replay makes up for it; if both are, something else differs.
        """
        parity, live = report.parity, report.mismatch_without_replay
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
                "k3_without_replay": None if live is None else live.k3_nats,
            }
            logger.error("engine and trainer disagree %s", fields(run=self._run_id, **payload))
            self._events.add(self._run_id, PARITY_ALARM, payload, self._wall_clock())
