"""The journal of trajectories: reserve -> finish -> commit -> trained, each step once.

Whichever process is killed, no committed trajectory is lost and none is trained twice. Every call may be
repeated; the first one counts.
"""

import time
from collections.abc import Iterator, Sequence

from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, or_, select, update

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.repositories import LedgerRepository
from ostinato.infra.platform.ledger.rows import JournalRow, JournalState
from ostinato.infra.platform.ledger.tables import JOURNAL
from ostinato.infra.platform.record import Record

_IDS_PER_QUERY = 500
_COMMIT_LOCK = 71_001


class Reservation(Record):
    """A trajectory about to be dispatched."""

    group_id: str
    trajectory_id: str
    problem_id: str
    weight_version: int


class Finish(Record):
    """End of a reserved trajectory."""

    trajectory_id: str
    outcome: str
    reason: str
    reward: float
    object_key: str | None


class JournalRepository(LedgerRepository):
    """The journal of all runs."""

    def reserve(self, run_id: str, entries: Sequence[Reservation]) -> None:
        """Notes trajectories before they are dispatched. Known ones are not changed."""
        now = time.time()
        rows = [
            {
                **entry.model_dump(),
                "run_id": run_id,
                "state": JournalState.RESERVED.value,
                "reserved_at": now,
            }
            for entry in entries
        ]
        with self._database.write() as connection:
            JOURNAL.insert_absent(connection, rows)

    def finish(self, entries: Sequence[Finish]) -> None:
        """Notes the first end of each trajectory. StorageError for a trajectory that was never reserved."""
        if not entries:
            return
        now = time.time()
        statement = (
            update(JOURNAL.table)
            .where(
                JOURNAL.c.trajectory_id == bindparam("wanted_id"),
                JOURNAL.c.state == JournalState.RESERVED,
            )
            .values(
                state=JournalState.FINISHED.value,
                outcome=bindparam("outcome"),
                reason=bindparam("reason"),
                reward=bindparam("reward"),
                object_key=bindparam("object_key"),
                finished_at=now,
            )
        )
        rows = [
            {"wanted_id": entry.trajectory_id, **entry.model_dump(exclude={"trajectory_id"})}
            for entry in entries
        ]
        with self._database.write() as connection:
            _require_reserved(connection, [entry.trajectory_id for entry in entries])
            connection.execute(statement, rows)

    def commit_group(self, group_id: str) -> None:
        """Hands a group to the trainer. StorageError while one of its members is reserved."""
        with self._database.write(_COMMIT_LOCK) as connection:
            states = connection.scalars(
                select(JOURNAL.c.state).where(JOURNAL.c.group_id == group_id)
            ).all()
            num_reserved = states.count(JournalState.RESERVED)
            if not states or num_reserved:
                raise StorageError(
                    f"group {group_id} cannot be committed: {num_reserved} of {len(states)} "
                    "trajectories are still reserved, wanted 0 of at least 1"
                )
            newest = JOURNAL.highest(connection, "commit_sequence")
            JOURNAL.update(
                connection,
                JOURNAL.equals(group_id=group_id, state=JournalState.FINISHED),
                state=JournalState.COMMITTED.value,
                commit_sequence=newest + 1,
            )

    def mark_trained(self, group_ids: Sequence[str], step: int) -> None:
        """Notes that step `step` used these groups. StorageError for a second, different step."""
        with self._database.write() as connection:
            for some in _chunked(group_ids):
                _refuse_retraining(connection, some, step)
                JOURNAL.update(
                    connection,
                    JOURNAL.c.group_id.in_(some),
                    JOURNAL.c.state == JournalState.COMMITTED,
                    state=JournalState.TRAINED.value,
                    trained_step=step,
                )

    def discard_groups(self, group_ids: Sequence[str], reason: str) -> None:
        """Notes that these finished or committed groups will never be trained, and why."""
        with self._database.write() as connection:
            for some in _chunked(group_ids):
                JOURNAL.update(
                    connection,
                    JOURNAL.c.group_id.in_(some),
                    JOURNAL.c.state.in_([JournalState.FINISHED, JournalState.COMMITTED]),
                    state=JournalState.DISCARDED.value,
                    reason=reason,
                )

    def committed_untrained(self, run_id: str) -> list[JournalRow]:
        """Committed rows that are not trained yet, in commit order."""
        return self._select(JOURNAL.equals(run_id=run_id, state=JournalState.COMMITTED))

    def finished_uncommitted(self, run_id: str) -> list[JournalRow]:
        """Finished rows of incomplete groups. A restarted orchestrator only runs the rest."""
        return self._select(JOURNAL.equals(run_id=run_id, state=JournalState.FINISHED))

    def rows(self, run_id: str) -> list[JournalRow]:
        """All rows of a run in commit order, uncommitted ones last."""
        return self._select(JOURNAL.c.run_id == run_id)

    def named(self, name: str) -> list[JournalRow]:
        """Rows of the run, group or trajectory of this id, in the order of `rows`."""
        columns = (JOURNAL.c.run_id, JOURNAL.c.group_id, JOURNAL.c.trajectory_id)
        return self._select(or_(*(column == name for column in columns)))

    def reopen_after(self, run_id: str, step: int) -> int:
        """Sets rows trained after `step`, the step of a restored checkpoint, back to committed. Returns how many."""
        with self._database.write() as connection:
            return JOURNAL.update(
                connection,
                JOURNAL.equals(run_id=run_id, state=JournalState.TRAINED),
                JOURNAL.c.trained_step > step,
                state=JournalState.COMMITTED.value,
                trained_step=None,
            )

    def release_reserved(self, run_id: str) -> int:
        """Deletes reserved rows, whose workers are gone, so that they are dispatched again. Returns how many."""
        with self._database.write() as connection:
            released = JOURNAL.equals(run_id=run_id, state=JournalState.RESERVED)
            return connection.execute(delete(JOURNAL.table).where(released)).rowcount

    def counts(self, run_id: str) -> dict[str, int]:
        """Number of rows in each state, 0 for states without rows."""
        counts = {state.value: 0 for state in JournalState}
        with self._database.read() as connection:
            for state, number in connection.execute(
                select(JOURNAL.c.state, func.count())
                .where(JOURNAL.c.run_id == run_id)
                .group_by(JOURNAL.c.state)
            ):
                counts[state] = number
        return counts

    def _select(self, *conditions: ColumnElement[bool]) -> list[JournalRow]:
        order = (
            JOURNAL.c.commit_sequence.is_(None),
            JOURNAL.c.commit_sequence,
            JOURNAL.c.group_id,
            JOURNAL.c.trajectory_id,
        )
        return self._list(JOURNAL, *conditions, order_by=order)


def _require_reserved(connection: Connection, trajectory_ids: list[str]) -> None:
    known = {
        name
        for some in _chunked(trajectory_ids)
        for name in connection.scalars(
            select(JOURNAL.c.trajectory_id).where(JOURNAL.c.trajectory_id.in_(some))
        )
    }
    unknown = [name for name in trajectory_ids if name not in known]
    if unknown:
        raise StorageError(
            f"{len(unknown)} trajectories finished that are not reserved (first: {unknown[0]}); "
            "reserve before dispatch, and stop workers before release_reserved"
        )


def _refuse_retraining(connection: Connection, group_ids: Sequence[str], step: int) -> None:
    twice = connection.execute(
        select(JOURNAL.c.group_id, JOURNAL.c.trained_step)
        .where(
            JOURNAL.c.group_id.in_(group_ids),
            JOURNAL.c.state == JournalState.TRAINED,
            JOURNAL.c.trained_step != step,
        )
        .limit(1)
    ).first()
    if twice is not None:
        raise StorageError(
            f"group {twice.group_id} was trained at step {twice.trained_step} "
            f"and now again at step {step}, wanted once"
        )


def _chunked(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ids[start : start + _IDS_PER_QUERY]
