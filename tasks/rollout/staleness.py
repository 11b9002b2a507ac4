"""The staleness policy: how many groups may start, which step may run, which group is too old.

A group is born at the oldest weight version that a replica serves when its first trajectory is
dispatched; it may be trained while trainer version - birth version <= max_staleness_versions.

Admission: a group starts only if the steps left before its deadline can train it together with all
groups already started (the AReaL capacity formula, counted from what is outstanding), and not
before the trainer will be about ready for it: what finishes early only grows stale. Pacing: a step
is held for late groups while those it leaves behind would not fit into the steps before their
deadlines.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of the newest duration: about the latest 10 groups or steps count
# On the mean time a group takes: at 1.5 the trainer waited for late ones 15 % of the time.
SLACK = 2.5


@dataclass(slots=True)
class ConsumptionEstimate:
    """Durations of groups, from start to ready, and of steps. None until one was seen."""

    group_seconds: float | None = None
    step_seconds: float | None = None

    def record_duration(self, seconds: float) -> None:
        self.group_seconds = _smoothed(self.group_seconds, seconds)

    def saw_step(self, seconds: float) -> None:
        self.step_seconds = _smoothed(self.step_seconds, seconds)


# Number of outstanding groups at which no other starts, from durations and the groups of a step.
# None: as many as the bound allows. Recipes may choose a policy; the metrics of each step hold the
# lengths of sampled and of trained attempts, which show a policy that leaves slow groups out.
Admission = Callable[[ConsumptionEstimate, int], int | None]


def start_when_expected(estimate: ConsumptionEstimate, groups_per_step: int) -> int | None:
    """Groups beyond which another would only wait for the trainer. None until durations are known."""
    if estimate.group_seconds is None or not estimate.step_seconds:
        return None
    steps_ahead = SLACK * estimate.group_seconds / estimate.step_seconds
    return math.ceil(groups_per_step * (1 + steps_ahead))


def start_at_once(estimate: ConsumptionEstimate, groups_per_step: int) -> int | None:
    """As many as the bound allows."""
    return None


def _smoothed(known: float | None, seen: float) -> float:
    return seen if known is None else known + SMOOTHING * (seen - known)


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """Bound on staleness and size of a step."""

    max_staleness_versions: int
    groups_per_step: int

    def capacity(
        self, *, trainer_version: int, engine_version: int, outstanding_groups: int
    ) -> int:
        """Groups that may start now. Outstanding: running, buffered and in the step under way. Not
        stale ones.

        With engines at the trainer's version this is
        (max_staleness + trainer_version + 1) * groups_per_step - groups started and not stale.
        """
        steps_left = self.max_staleness_versions + engine_version - trainer_version + 1
        return max(0, steps_left * self.groups_per_step - outstanding_groups)

    def is_stale(self, birth_version: int, trainer_version: int) -> bool:
        """Whether the group can no longer be trained."""
        return trainer_version - birth_version > self.max_staleness_versions

    def latest_birth_version(
        self, left_behind: Sequence[int] | Mapping[int, int], trainer_version: int
    ) -> int | None:
        """Birth version of the first groups that a step at trainer_version would leave too little
        room for.

        left_behind: birth versions of all groups, running or ready, outside the step, or groups by
        birth version. None: all of them still fit into the steps before their deadlines, so the step
        may run.
        """
        count = 0
        for birth, groups in sorted(Counter(left_behind).items()):
            count += groups
            steps_left = max(0, birth + self.max_staleness_versions - trainer_version)
            if count > steps_left * self.groups_per_step:
                return birth
        return None
