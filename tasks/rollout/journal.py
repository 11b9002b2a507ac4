"""Durable rollouts: rows in the ledger, payloads in the object store. A group counts from its commit on, and
its payload is stored before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.infra.platform.ledger.journal import Finish, JournalRepository, Reservation
from ostinato.infra.platform.objects import ObjectStore
from ostinato.tasks.records import Group, Trajectory
from ostinato.tasks.rollout.payload import group_from_bytes, group_to_bytes
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import oldest_version

RESTARTED = "the orchestrator restarted before the group was complete"


@dataclass(frozen=True, slots=True)
class UntrainedGroup:
    """A committed group that the restored weights have not been trained on."""

    group: Group
    birth_version: int  # oldest version of its tokens, or without tokens the one at its dispatch


class GroupJournal:
    """Journal of attempts and groups, written by the orchestrator. This one records nothing, for a run that is never
    resumed.
    """

    def reserve(self, requests: Sequence[AttemptRequest], weight_version: int) -> None:
        """Records attempts before they are dispatched."""

    def fail(self, trajectory: Trajectory) -> None:
        """Records an attempt that ended by a failure of infrastructure."""

    def commit(self, group: Group) -> None:
        """Makes a group available to the trainer."""

    def retire(self, group: Group, reason: str) -> None:
        """Records that a group is never trained, and why."""


class RolloutJournal(GroupJournal):
    """The journal of one run, in ledger and object store."""

    def __init__(self, rows: JournalRepository, objects: ObjectStore, run_id: str) -> None:
        self._rows = rows
        self._objects = objects
        self._run_id = run_id

    def reserve(self, requests: Sequence[AttemptRequest], weight_version: int) -> None:
        entries = [
            Reservation(
                group_id=request.group_id,
                trajectory_id=request.trajectory_id,
                problem_id=request.problem.problem_id,
                weight_version=weight_version,
            )
            for request in requests
        ]
        self._rows.reserve(self._run_id, entries)

    def fail(self, trajectory: Trajectory) -> None:
        self._rows.finish([_finish(trajectory, None)])

    def commit(self, group: Group) -> None:
        """Stores the payload, then makes the group available to the trainer."""
        key = f"rollouts/{self._run_id}/{group.group_id}.safetensors"
        self._objects.put_bytes(key, group_to_bytes(group))
        self._rows.finish([_finish(member, key) for member in group.trajectories])
        self._rows.commit_group(group.group_id)

    def retire(self, group: Group, reason: str) -> None:
        self._rows.finish([_finish(member, None) for member in group.trajectories])
        self._rows.discard_groups([group.group_id], reason)

    def mark_trained(self, group_ids: Sequence[str], step: int) -> None:
        """Records that a step used these groups. Call it before the checkpoint of that step is written.

        After a crash in between, the checkpoint before is restored and `restore` returns the groups.
        """
        self._rows.mark_trained(group_ids, step)

    def restore(self, checkpoint_step: int) -> list[UntrainedGroup]:
        """Groups that are still to be trained after a restart from a step's checkpoint. Unfinished attempts are deleted."""
        self._rows.release_reserved(self._run_id)
        self._rows.reopen_after(self._run_id, checkpoint_step)
        orphans = {row.group_id for row in self._rows.finished_uncommitted(self._run_id)}
        self._rows.discard_groups(sorted(orphans), RESTARTED)
        births: dict[str, int] = {}
        keys: dict[str, str] = {}
        for row in self._rows.committed_untrained(self._run_id):
            births[row.group_id] = min(
                row.weight_version, births.get(row.group_id, row.weight_version)
            )
            if row.object_key is not None:
                keys[row.group_id] = row.object_key
        groups = [group_from_bytes(self._objects.get_bytes(key)) for key in keys.values()]
        oldest = map(oldest_version, groups)
        return [
            UntrainedGroup(group, births[group.group_id] if version is None else version)
            for group, version in zip(groups, oldest, strict=True)
        ]

    def trained(self, step: int) -> list[Group]:
        """Groups that a step used."""
        rows = [row for row in self._rows.rows(self._run_id) if row.trained_step == step]
        keys = sorted({row.object_key for row in rows if row.object_key is not None})
        return [group_from_bytes(self._objects.get_bytes(key)) for key in keys]

    def release(self) -> None:
        """Deletes attempts that were cancelled at the end of a run."""
        self._rows.release_reserved(self._run_id)

    def drawn(self) -> dict[int, str | None]:
        """Problem id of every group in the journal, by group number. None: a restart cut the group off."""
        return {
            int(row.group_id.rsplit(".g", 1)[1]): None
            if row.reason == RESTARTED
            else row.problem_id
            for row in self._rows.rows(self._run_id)
        }

    def committed(self) -> set[str]:
        """Ids of all groups that were committed."""
        rows = self._rows.rows(self._run_id)
        return {row.group_id for row in rows if row.commit_sequence is not None}

    def counts(self) -> dict[str, int]:
        return self._rows.counts(self._run_id)


def _finish(trajectory: Trajectory, key: str | None) -> Finish:
    return Finish(
        trajectory_id=trajectory.trajectory_id,
        outcome=trajectory.outcome.value,
        reason=trajectory.reason,
        reward=trajectory.reward.total,
        object_key=key,
    )
