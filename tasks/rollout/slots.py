"""Group table of the orchestrator: every started group and its state. Each dispatched trajectory has
exactly one outcome.
"""

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ostinato.tasks.records import Group, Outcome, Trajectory
from ostinato.tasks.rollout.staleness import StalenessPolicy

SPREAD_LEARNING_RATE = 0.05  # the average covers about the latest 20 groups
NAMED_GROUPS = 16  # most late groups that a message names
LEAST_SPREAD_RATIO = 0.25  # admission starts at most 4 groups for each one that fills a step
INFRASTRUCTURE_OUTCOMES = frozenset({Outcome.SANDBOX_FAILED, Outcome.ENGINE_FAILED})


class GroupState(StrEnum):
    """State of a group."""

    RUNNING = "running"  # some trajectories are not finished
    READY = "ready"  # committed, waiting for a step
    TRAINING = "training"  # in the running step
    TRAINED = "trained"
    STALE = "stale"  # became too old before a step used it
    FAILED = (
        "failed"  # fewer than two trajectories are usable, or each ended by an unknown exception
    )


@dataclass(slots=True)
class GroupSlot:
    """One started group."""

    group_id: str
    problem_id: str
    birth_version: int
    started_at: float
    trajectories_expected: int
    state: GroupState = GroupState.RUNNING
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # by attempt
    ready_order: int = -1
    fills_step: bool = True  # counts towards groups_per_step; known once ready

    @property
    def group(self) -> Group:
        """Record of a complete group in the order of attempts, without failed members."""
        members = (self.trajectories[attempt] for attempt in sorted(self.trajectories))
        usable = tuple(
            member for member in members if member.outcome not in INFRASTRUCTURE_OUTCOMES
        )
        return Group(group_id=self.group_id, problem_id=self.problem_id, trajectories=usable)


def reward_spread(group: Group) -> float:
    """Largest minus smallest reward of all trained segments. If it is zero, all advantages are zero."""
    reports = [one.reward for one in group.trajectories if not one.is_context_only]
    rewards = [report.total + offset for report in reports for offset in report.segments or (0.0,)]
    return max(rewards, default=0.0) - min(rewards, default=0.0)


def oldest_version(group: Group) -> int | None:
    """Oldest weight version that sampled a token of the group. None: nothing was sampled."""
    versions = [
        segment.oldest_version
        for trajectory in group.trajectories
        for segment in trajectory.transcript.segments
        if segment.sampled_tokens
    ]
    return min(versions) if versions else None


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups of the next step, or the reason why there is none yet."""

    slots: tuple[GroupSlot, ...]
    waits_for: str = ""
    detail: str = ""
    late_groups: tuple[str, ...] = ()


class GroupTable:
    """All outstanding groups, and counts of ended ones."""

    def __init__(self, policy: StalenessPolicy, *, least_spread: float) -> None:
        self.policy = policy
        self.least_spread = least_spread  # of rewards, for a group to count towards groups_per_step
        self.groups: dict[str, GroupSlot] = {}
        self.problems: Counter[str] = Counter()  # running groups by problem
        self._running: dict[int, dict[str, GroupSlot]] = {}  # by birth version, in order of start
        self._ready: list[GroupSlot] = []  # oldest first
        self._num_known = 0  # groups that are not running and fill a step
        self._changes = 0  # changes so far: groups opened, made ready, taken, ended
        self._decided: tuple[tuple[int, int, bool, bool], Batch] | None = None
        self.outcomes: Counter[str] = Counter()  # trajectories by outcome, retries included
        self.ended: Counter[str] = Counter()  # groups by final state
        self.spread_ratio = 1.0  # share of groups that fill a step, among recently finished ones
        self._ready_count = 0

    def open(self, slot: GroupSlot) -> None:
        if slot.group_id in self.groups:
            raise ValueError(f"group {slot.group_id} is already open")
        self._changes += 1
        self.groups[slot.group_id] = slot
        self._running.setdefault(slot.birth_version, {})[slot.group_id] = slot
        self.problems[slot.problem_id] += 1

    def restore(self, group: Group, birth_version: int) -> GroupSlot:
        """Adds a group that an earlier process committed as ready."""
        slot = GroupSlot(
            group_id=group.group_id,
            problem_id=group.problem_id,
            birth_version=birth_version,
            started_at=min(member.started_at for member in group.trajectories),
            trajectories_expected=len(group.trajectories),
            trajectories={member.attempt: member for member in group.trajectories},
        )
        self.open(slot)
        self._make_ready(slot, None)
        return slot

    def finish(self, trajectory: Trajectory) -> GroupSlot | None:
        """Adds a final trajectory to its group. Returns the slot if the group is now complete."""
        slot = self.groups[trajectory.group_id]
        if trajectory.attempt in slot.trajectories:
            raise ValueError(
                f"attempt {trajectory.attempt} of group {slot.group_id} finished twice"
            )
        slot.trajectories[trajectory.attempt] = trajectory
        if len(slot.trajectories) < slot.trajectories_expected:
            return None
        usable = slot.group.trajectories
        if len(usable) < 2 or all(member.is_fault for member in usable):
            self.end(slot, GroupState.FAILED)
        else:
            self._make_ready(slot, oldest_version(slot.group))
        return slot

    def take(self, slots: Iterable[GroupSlot]) -> None:
        """Moves ready groups into the step that starts now."""
        self._changes += 1
        for slot in slots:
            slot.state = GroupState.TRAINING
        self._ready = [slot for slot in self._ready if slot.state is GroupState.READY]

    def end(self, slot: GroupSlot, state: GroupState) -> None:
        """Closes a group in one of its final states."""
        self._changes += 1
        if slot.state is GroupState.RUNNING:
            self._leave_running(slot)
        else:
            self._num_known -= slot.fills_step
        if slot.state is GroupState.READY:
            self._ready.remove(slot)
        slot.state = state
        del self.groups[slot.group_id]
        self.ended[state.value] += 1

    @property
    def num_running(self) -> int:
        """Number of groups with unfinished trajectories."""
        return sum(map(len, self._running.values()))

    def capacity(
        self, *, trainer_version: int, engine_version: int, useful_groups: int | None = None
    ) -> int:
        """Number of groups that may start now. Ready groups without spread do not fill a step, so they
        are not counted. Of the running groups, the recent share with spread is counted; if more have
        spread, later steps train them too. `useful_groups`: most outstanding groups.
        """
        outstanding = math.ceil(self.num_running * self.spread_ratio + self._num_known)
        capacity = self.policy.capacity(
            trainer_version=trainer_version,
            engine_version=engine_version,
            outstanding_groups=outstanding,
        )
        if useful_groups is None:
            return capacity
        return max(0, min(capacity, useful_groups - outstanding))

    def stale(self, trainer_version: int) -> list[GroupSlot]:
        """Ready groups that are too old to be trained."""
        return list(
            itertools.takewhile(
                lambda slot: self.policy.is_stale(slot.birth_version, trainer_version), self._ready
            )
        )

    @property
    def filling(self) -> list[GroupSlot]:
        """Ready groups that count towards a step, oldest first."""
        return [slot for slot in self._ready if slot.fills_step]

    def next_batch(
        self, trainer_version: int, *, pace: bool = True, is_last: bool = False
    ) -> Batch:
        """The groups of the next step, oldest first, or what it waits for. `pace`: wait for late
        groups. `is_last`: no more groups will finish, so that fewer make a step.
        """
        key = self._changes, trainer_version, pace, is_last
        if self._decided is None or self._decided[0] != key:
            self._decided = key, self._decide(trainer_version, pace=pace, is_last=is_last)
        return self._decided[1]

    def _decide(self, trainer_version: int, *, pace: bool, is_last: bool) -> Batch:
        filling = self.filling
        wanted = self.policy.groups_per_step
        if is_last and filling:
            wanted = min(wanted, len(filling))
        if len(filling) < wanted:
            return Batch(
                slots=(),
                waits_for="ready groups",
                detail=f"has {len(filling)}, wants {wanted}",
            )
        chosen = filling[:wanted]
        left_behind = Counter(slot.birth_version for slot in filling[wanted:])
        left_behind.update({birth: len(slots) for birth, slots in self._running.items()})
        crowded = self.policy.latest_birth_version(left_behind, trainer_version)
        if pace and crowded is not None:
            late_births = [
                birth
                for birth in self._running
                if birth <= crowded
                and (
                    chosen[-1].birth_version > crowded
                    or self.policy.is_stale(birth, trainer_version + 1)
                )
            ]
            groups = (name for birth in late_births for name in self._running[birth])
            if late := tuple(itertools.islice(groups, NAMED_GROUPS)):
                return Batch(
                    slots=(),
                    waits_for="late groups",
                    detail=", ".join(late),
                    late_groups=late,
                )
        taken = {slot.group_id for slot in chosen}
        next_version = trainer_version + 1
        additional = [
            slot
            for slot in self._ready
            if slot.group_id not in taken
            and (not slot.fills_step or self.policy.is_stale(slot.birth_version, next_version))
        ]
        return Batch(slots=tuple(chosen + additional))

    def describe(self, batch: Batch, trainer_version: int) -> dict[str, float]:
        """Metrics of a batch, and totals of stale groups and of outcomes so far."""
        ages = [trainer_version - slot.birth_version for slot in batch.slots]
        level = sum(reward_spread(slot.group) == 0 for slot in batch.slots)
        return {
            "groups": len(batch.slots),
            "groups_without_spread": level,
            "groups_without_spread_ratio": level / len(batch.slots),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": max(ages),
            "groups_stale_total": self.ended[GroupState.STALE.value],
            **{f"outcome_{name}_total": count for name, count in sorted(self.outcomes.items())},
        }

    def _leave_running(self, slot: GroupSlot) -> None:
        del self._running[slot.birth_version][slot.group_id]
        if not self._running[slot.birth_version]:
            del self._running[slot.birth_version]
        self.problems[slot.problem_id] -= 1
        if not self.problems[slot.problem_id]:
            del self.problems[slot.problem_id]

    def _make_ready(self, slot: GroupSlot, oldest: int | None) -> None:
        self._changes += 1
        self._leave_running(slot)
        slot.state = GroupState.READY
        slot.birth_version = slot.birth_version if oldest is None else oldest
        slot.fills_step = reward_spread(slot.group) >= self.least_spread
        share = 1.0 if slot.fills_step else 0.0
        self.spread_ratio = max(
            LEAST_SPREAD_RATIO,
            self.spread_ratio + SPREAD_LEARNING_RATE * (share - self.spread_ratio),
        )
        self._num_known += slot.fills_step
        slot.ready_order = self._ready_count
        self._ready_count += 1
        insort(self._ready, slot, key=lambda one: (one.birth_version, one.ready_order))
