"""Which checkpoint serves users, and how it came to.

A change is journalled in three commits: open an entry, flip the pointer, close the entry; killed in
between, the next call finishes it when the pointer was flipped and undoes it when not. It judges
nothing.
"""

from typing import Literal

from sqlalchemy import Connection, insert, select, update

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.models import ChampionTable, PromotionTable
from ostinato.infra.platform.ledger.rows import Pointer, PromotionRow

_SLOT = "champion"
_LOCK = 71_004


class PromotionRepository:
    """The champion and its history."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def current(self) -> Pointer | None:
        """The champion; None before the first promotion."""
        with self._database.read() as connection:
            return _pointer(connection)

    def history(self) -> list[PromotionRow]:
        """All entries, oldest first, with those left open by a kill settled."""
        self.settle()
        with self._database.read() as connection:
            return _entries(connection)

    def promote(
        self, checkpoint_id: str, scorecard_id: str | None, reason: str, at: float
    ) -> Pointer:
        """Make a checkpoint the champion; nothing changes if it is already."""
        self.settle()
        now = self.current()
        if now is not None and now.checkpoint_id == checkpoint_id:
            return now
        return self._move("promote", checkpoint_id, scorecard_id, reason, at)

    def roll_back(self, reason: str, at: float, checkpoint_id: str | None = None) -> Pointer:
        """Return to the champion before the current one.

        With `checkpoint_id` given it is that checkpoint which must go: nothing changes when another
        one is champion. Without an earlier champion: StorageError.
        """
        self.settle()
        with self._database.read() as connection:
            stack = _stack(_entries(connection))
            now = _pointer(connection)
        if now is not None and checkpoint_id is not None and now.checkpoint_id != checkpoint_id:
            return now
        if len(stack) < 2:
            seen = now.checkpoint_id if now is not None else None
            raise StorageError(
                f"cannot roll back from checkpoint {seen}: no champion before it, wanted one"
            )
        earlier = stack[-2]
        return self._move("roll_back", earlier.to_checkpoint_id, earlier.scorecard_id, reason, at)

    def settle(self) -> None:
        """Close entries whose pointer was flipped and undo those whose was not."""
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            pointer = _pointer(connection)
            flipped = pointer.entry_id if pointer is not None else -1
            for entry in _entries(connection):
                if entry.state == "open":
                    state = "closed" if entry.entry_id == flipped else "undone"
                    _set_state(connection, entry.entry_id, state)

    def _move(
        self,
        action: Literal["promote", "roll_back"],
        checkpoint_id: str,
        scorecard_id: str | None,
        reason: str,
        at: float,
    ) -> Pointer:
        entry_id = self._open_entry(action, checkpoint_id, scorecard_id, reason, at)
        self._flip(entry_id)
        with self._database.write() as connection:
            _set_state(connection, entry_id, "closed")
            pointer = _pointer(connection)
        if pointer is None or pointer.entry_id != entry_id:
            seen = pointer.entry_id if pointer is not None else None
            raise StorageError(
                f"promotion entry {entry_id} was overtaken: the pointer is at entry {seen}; "
                "promote from one process at a time"
            )
        return pointer

    def _open_entry(
        self, action: str, checkpoint_id: str, scorecard_id: str | None, reason: str, at: float
    ) -> int:
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            now = _pointer(connection)
            return connection.execute(
                insert(PromotionTable)
                .values(
                    action=action,
                    state="open",
                    from_checkpoint_id=now.checkpoint_id if now is not None else None,
                    to_checkpoint_id=checkpoint_id,
                    scorecard_id=scorecard_id,
                    reason=reason,
                    at=at,
                )
                .returning(PromotionTable.entry_id)
            ).scalar_one()

    def _flip(self, entry_id: int) -> None:
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            entry = next(row for row in _entries(connection) if row.entry_id == entry_id)
            values = {
                "checkpoint_id": entry.to_checkpoint_id,
                "scorecard_id": entry.scorecard_id,
                "entry_id": entry.entry_id,
                "reason": entry.reason,
                "at": entry.at,
            }
            self._database.insert_absent(connection, ChampionTable, [{"slot": _SLOT, **values}])
            connection.execute(
                update(ChampionTable).where(ChampionTable.slot == _SLOT).values(**values)
            )


def _pointer(connection: Connection) -> Pointer | None:
    found = connection.execute(
        select(
            ChampionTable.checkpoint_id,
            ChampionTable.scorecard_id,
            ChampionTable.entry_id,
            ChampionTable.reason,
            ChampionTable.at,
        ).where(ChampionTable.slot == _SLOT)
    ).first()
    return Pointer.model_validate(found) if found is not None else None


def _entries(connection: Connection) -> list[PromotionRow]:
    found = connection.execute(
        select(PromotionTable.__table__).order_by(PromotionTable.entry_id)
    ).all()
    return [PromotionRow.model_validate(row) for row in found]


def _set_state(connection: Connection, entry_id: int, state: str) -> None:
    connection.execute(
        update(PromotionTable).where(PromotionTable.entry_id == entry_id).values(state=state)
    )


def _stack(entries: list[PromotionRow]) -> list[PromotionRow]:
    """The promotions still standing, the champion's last: a roll back takes the newest one away."""
    standing: list[PromotionRow] = []
    for entry in entries:
        if entry.state == "closed" and entry.action == "promote":
            standing.append(entry)
        elif entry.state == "closed":
            standing.pop()
    return standing
