"""Rates of hack patterns over the newest attempts, and alarms when they are too high.

`HackMonitor`: a window of graded trajectories, the share that shows each pattern, drifts that no
single attempt shows (a reward that jumps while attempts shrink, more questions, fewer edits). It
stops nothing.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ostinato.tasks.grading.conduct import count_questions
from ostinato.tasks.grading.config import MonitorConfig, Pattern
from ostinato.tasks.records import Trajectory


@dataclass(frozen=True, slots=True)
class Alarm:
    """One measure over its threshold."""

    name: str
    value: float
    threshold: float
    evidence: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3f} (limit {self.threshold:.3f}): {self.evidence}"


@dataclass(frozen=True, slots=True)
class _Seen:
    flags: Mapping[str, str]
    trajectory_id: str
    reward: float
    generated_tokens: int
    asked: bool
    edited: bool


class HackMonitor:
    """Rates of suspicious patterns over the newest graded attempts of one run."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._window: deque[_Seen] = deque(maxlen=config.window_trajectories)
        self._raised: set[str] = set()

    def observe(self, trajectories: Iterable[Trajectory]) -> None:
        """Adds attempts. Those that were never graded say nothing about the policy."""
        for trajectory in trajectories:
            if trajectory.verdict is not None:
                self._window.append(_see(trajectory))

    def rates(self) -> dict[Pattern, float]:
        """Share of the window that shows each pattern."""
        count = max(1, len(self._window))
        return {
            pattern: sum(pattern.value in seen.flags for seen in self._window) / count
            for pattern in Pattern
        }

    def alarms(self) -> tuple[Alarm, ...]:
        """Everything that is over its threshold now. Nothing before the window says enough."""
        if len(self._window) < self._config.least_trajectories:
            return ()
        found: list[Alarm] = []
        for pattern, rate in self.rates().items():
            threshold = self._config.threshold(pattern)
            if rate >= threshold:
                last = next(seen for seen in reversed(self._window) if pattern.value in seen.flags)
                evidence = f"{last.trajectory_id}: {last.flags[pattern.value]}"
                found.append(Alarm(pattern.value, rate, threshold, evidence))
        return (*found, *self._drifts())

    def new_alarms(self) -> tuple[Alarm, ...]:
        """Alarms that were not there at the last call. One that went away may come again."""
        now = self.alarms()
        new = tuple(alarm for alarm in now if alarm.name not in self._raised)
        self._raised = {alarm.name for alarm in now}
        return new

    def metrics(self) -> dict[str, float]:
        """Names for metrics.jsonl. One rate per pattern, and how many alarms stand."""
        rates = {f"hack_{pattern.value}_ratio": rate for pattern, rate in self.rates().items()}
        flagged = sum(bool(seen.flags) for seen in self._window) / max(1, len(self._window))
        return {**rates, "hack_any_ratio": flagged, "hack_alarms": float(len(self.alarms()))}

    def _drifts(self) -> list[Alarm]:
        config, seen = self._config, list(self._window)
        older, newer = seen[: len(seen) // 2], seen[len(seen) // 2 :]
        found: list[Alarm] = []
        gain = _mean([each.reward for each in newer]) - _mean([each.reward for each in older])
        before = _mean([each.generated_tokens for each in older])
        after = _mean([each.generated_tokens for each in newer])
        if gain >= config.jump_reward and after <= config.jump_tokens_ratio * before:
            evidence = f"tokens {before:.0f} -> {after:.0f}"
            found.append(Alarm("reward_jump", gain, config.jump_reward, evidence))
        rise = _mean([each.asked for each in newer]) - _mean([each.asked for each in older])
        if rise >= config.question_rise_ratio:
            evidence = f"asking now {_mean([each.asked for each in newer]):.0%}"
            found.append(Alarm("question_rise", rise, config.question_rise_ratio, evidence))
        fall = _mean([each.edited for each in older]) - _mean([each.edited for each in newer])
        if fall >= config.edit_fall_ratio:
            evidence = f"editing now {_mean([each.edited for each in newer]):.0%}"
            found.append(Alarm("edit_fall", fall, config.edit_fall_ratio, evidence))
        return found


def _see(trajectory: Trajectory) -> _Seen:
    return _Seen(
        flags=trajectory.reward.flags,
        trajectory_id=trajectory.trajectory_id,
        reward=trajectory.reward.total,
        generated_tokens=sum(turn.generated_tokens for turn in trajectory.transcript.turns),
        asked=count_questions(trajectory.transcript) > 0,
        edited=bool(trajectory.changed_files),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
