"""The checkpoint that serves the users of each serving line, and how it came to.

The pointer and the entry of its history change in one transaction, so a kill leaves both or
neither.
"""

from typing import Literal

from sqlalchemy import Connection, insert, select, update

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.models import ChampionTable, PromotionTable
from ostinato.infra.platform.ledger.rows import Pointer, PromotionRow

_LOCK = 71_004


class PromotionRepository:
    """Champions of the serving lines and their history."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def current(self, line: str) -> Pointer | None:
        """The champion of a line. None before its first promotion."""
        with self._database.read() as connection:
            return _pointer(connection, line)

    def lines(self) -> list[str]:
        """Names of the lines that have a champion."""
        with self._database.read() as connection:
            return sorted(connection.scalars(select(ChampionTable.line)))

    def history(self, line: str) -> list[PromotionRow]:
        """All changes of a line's champion, oldest first."""
        with self._database.read() as connection:
            return _entries(connection, line)

    def promote(
        self, line: str, checkpoint_id: str, scorecard_id: str | None, reason: str, at: float
    ) -> Pointer:
        """Make a checkpoint the champion of a line. Nothing changes if it is already."""
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            now = _pointer(connection, line)
            if now is not None and now.checkpoint_id == checkpoint_id:
                return now
            return self._move(connection, "promote", line, checkpoint_id, scorecard_id, reason, at)

    def roll_back(
        self, line: str, reason: str, at: float, checkpoint_id: str | None = None
    ) -> Pointer:
        """Return to the champion before the current one.

        With `checkpoint_id` given it is that checkpoint which must go: nothing changes when another
        one is champion. Without an earlier champion: StorageError.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            stack = _stack(_entries(connection, line))
            now = _pointer(connection, line)
            if now is not None and checkpoint_id is not None and now.checkpoint_id != checkpoint_id:
                return now
            if len(stack) < 2:
                seen = now.checkpoint_id if now is not None else None
                raise StorageError(
                    f"cannot roll back line {line} from checkpoint {seen}: no champion before it, "
                    "wanted one"
                )
            target = stack[-2]
            return self._move(
                connection,
                "roll_back",
                line,
                target.to_checkpoint_id,
                target.scorecard_id,
                reason,
                at,
            )

    def _move(
        self,
        connection: Connection,
        action: Literal["promote", "roll_back"],
        line: str,
        checkpoint_id: str,
        scorecard_id: str | None,
        reason: str,
        at: float,
    ) -> Pointer:
        before = _pointer(connection, line)
        entry_id = connection.execute(
            insert(PromotionTable)
            .values(
                line=line,
                action=action,
                from_checkpoint_id=before.checkpoint_id if before is not None else None,
                to_checkpoint_id=checkpoint_id,
                scorecard_id=scorecard_id,
                reason=reason,
                at=at,
            )
            .returning(PromotionTable.entry_id)
        ).scalar_one()
        values = {
            "checkpoint_id": checkpoint_id,
            "scorecard_id": scorecard_id,
            "entry_id": entry_id,
            "reason": reason,
            "at": at,
        }
        self._database.insert_absent(connection, ChampionTable, [{"line": line, **values}])
        connection.execute(update(ChampionTable).where(ChampionTable.line == line).values(**values))
        return Pointer(**values)


def _pointer(connection: Connection, line: str) -> Pointer | None:
    found = connection.execute(
        select(
            ChampionTable.checkpoint_id,
            ChampionTable.scorecard_id,
            ChampionTable.entry_id,
            ChampionTable.reason,
            ChampionTable.at,
        ).where(ChampionTable.line == line)
    ).first()
    return Pointer.model_validate(found) if found is not None else None


def _entries(connection: Connection, line: str) -> list[PromotionRow]:
    found = connection.execute(
        select(PromotionTable.__table__)
        .where(PromotionTable.line == line)
        .order_by(PromotionTable.entry_id)
    ).all()
    return [PromotionRow.model_validate(row) for row in found]


def _stack(entries: list[PromotionRow]) -> list[PromotionRow]:
    """The promotions still standing, the champion's last: a roll back takes the newest one away."""
    standing: list[PromotionRow] = []
    for entry in entries:
        if entry.action == "promote":
            standing.append(entry)
        else:
            standing.pop()
    return standing
