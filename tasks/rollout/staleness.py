"""The staleness policy: how many groups may start, which step may run, which group is too old.

The birth version of a group is the oldest weight version that any replica serves when its first
trajectory is dispatched. It may be trained while trainer version - birth version <=
max_staleness_versions.

Admission: a group starts only if the steps before its deadline can train it together with all
outstanding groups (the capacity formula of AReaL), and not long before the trainer can use it, because
a group that finishes early only becomes stale. Pacing: a step waits for late groups while the groups
that it leaves behind would not fit into the steps before their deadlines.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of the newest duration: the average covers about the latest 10
# Factor on the mean duration of a group: at 1.5 the trainer waited for late groups 15 % of the time.
SLACK = 2.5


@dataclass(slots=True)
class ConsumptionEstimate:
    """Mean duration of groups, from start to ready, and of steps. None: no group or step has ended."""

    group_seconds: float | None = None
    step_seconds: float | None = None

    def record_group(self, seconds: float) -> None:
        self.group_seconds = _smoothed(self.group_seconds, seconds)

    def record_step(self, seconds: float) -> None:
        self.step_seconds = _smoothed(self.step_seconds, seconds)


# From durations and groups per step, the number of outstanding groups at which no other group starts.
# None: as many as the bound allows. The metrics of each step compare the lengths of sampled and trained
# attempts, which shows whether a rule loses slow groups.
Admission = Callable[[ConsumptionEstimate, int], int | None]


def start_when_expected(estimate: ConsumptionEstimate, groups_per_step: int) -> int | None:
    """Number of groups beyond which another would only wait for the trainer. None: durations are unknown."""
    if estimate.group_seconds is None or not estimate.step_seconds:
        return None
    steps_ahead = SLACK * estimate.group_seconds / estimate.step_seconds
    return math.ceil(groups_per_step * (1 + steps_ahead))


def start_at_once(estimate: ConsumptionEstimate, groups_per_step: int) -> int | None:
    """None: the bound on staleness is the only limit."""
    return None


def _smoothed(known: float | None, seen: float) -> float:
    return seen if known is None else known + SMOOTHING * (seen - known)


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """Rules that follow from the bound on staleness and the size of a step."""

    max_staleness_versions: int
    groups_per_step: int

    def capacity(
        self, *, trainer_version: int, engine_version: int, outstanding_groups: int
    ) -> int:
        """Number of groups that may start now. Running groups, ready ones and those in the running step
        are outstanding; stale groups are not.

        With engines at the trainer's version this is
        (max_staleness + trainer_version + 1) * groups_per_step - groups started and not stale.
        """
        steps_left = self.max_staleness_versions + engine_version - trainer_version + 1
        return max(0, steps_left * self.groups_per_step - outstanding_groups)

    def is_stale(self, birth_version: int, trainer_version: int) -> bool:
        """Whether the group is too old to be trained."""
        return trainer_version - birth_version > self.max_staleness_versions

    def latest_birth_version(
        self, left_behind: Sequence[int] | Mapping[int, int], trainer_version: int
    ) -> int | None:
        """First birth version with groups that would not fit into the steps before their deadlines if a
        step ran at trainer_version. None: all groups fit, so the step may run.

        left_behind: birth versions of all running or ready groups outside the step, or numbers of
        groups by birth version.
        """
        count = 0
        for birth, groups in sorted(Counter(left_behind).items()):
            count += groups
            steps_left = max(0, birth + self.max_staleness_versions - trainer_version)
            if count > steps_left * self.groups_per_step:
                return birth
        return None
