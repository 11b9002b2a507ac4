"""Champions of the serving lines, present and past: the checkpoints that serve their users.

A line's champion is what its newest entry names, so a kill leaves the old one or the new.
"""

from typing import Literal

from sqlalchemy import Connection, insert, select

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Repository
from ostinato.infra.platform.ledger.rows import PromotionRow
from ostinato.infra.platform.ledger.tables import PROMOTIONS

_LOCK = 71_004


class PromotionRepository(Repository):
    """Champions of the serving lines and their history."""

    def current(self, line: str) -> PromotionRow | None:
        """The champion of a line. None before its first promotion."""
        history = self.history(line)
        return history[-1] if history else None

    def lines(self) -> list[str]:
        """Names of the lines that have a champion."""
        with self._database.read() as connection:
            return sorted(connection.scalars(select(PROMOTIONS.c.line).distinct()))

    def history(self, line: str) -> list[PromotionRow]:
        """All changes of a line's champion, oldest first."""
        with self._database.read() as connection:
            return _entries(connection, line)

    def standing(self, line: str) -> list[str]:
        """Checkpoints whose promotion was not rolled back, oldest first. The last one serves."""
        return [entry.checkpoint_id for entry in _standing(self.history(line))]

    def promote(
        self,
        line: str,
        checkpoint_id: str,
        scorecard_id: str | None,
        reason: str,
        at: float,
        *,
        instead_of: str | None = None,
    ) -> PromotionRow | None:
        """Makes a checkpoint the champion of a line; nothing changes if it is already. None, and nothing
        changes, when `instead_of` is given and is not the champion.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            entries = _entries(connection, line)
            now = entries[-1].checkpoint_id if entries else None
            if now == checkpoint_id:
                return entries[-1]
            if instead_of not in (None, now):
                return None
            return _add(connection, "promote", line, checkpoint_id, scorecard_id, reason, at)

    def roll_back(
        self, line: str, reason: str, at: float, checkpoint_id: str | None = None
    ) -> PromotionRow:
        """Return to the champion before the current one.

        Nothing changes when `checkpoint_id` is given and is not the champion. StorageError without
        an earlier champion.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            entries = _entries(connection, line)
            now = entries[-1] if entries else None
            if now is not None and checkpoint_id not in (None, now.checkpoint_id):
                return now
            standing = _standing(entries)
            if len(standing) < 2:
                seen = now.checkpoint_id if now is not None else None
                raise StorageError(
                    f"cannot roll back line {line} from checkpoint {seen}: no champion before it, "
                    "wanted one"
                )
            to = standing[-2]
            return _add(
                connection, "roll_back", line, to.checkpoint_id, to.scorecard_id, reason, at
            )


def _add(
    connection: Connection,
    action: Literal["promote", "roll_back"],
    line: str,
    checkpoint_id: str,
    scorecard_id: str | None,
    reason: str,
    at: float,
) -> PromotionRow:
    values = {
        "line": line,
        "action": action,
        "checkpoint_id": checkpoint_id,
        "scorecard_id": scorecard_id,
        "reason": reason,
        "at": at,
    }
    adding = insert(PROMOTIONS.table).values(values).returning(PROMOTIONS.c.entry_id)
    return PromotionRow(entry_id=connection.scalars(adding).one(), **values)


def _entries(connection: Connection, line: str) -> list[PromotionRow]:
    return PROMOTIONS.list(connection, PROMOTIONS.c.line == line, order_by=PROMOTIONS.c.entry_id)


def _standing(entries: list[PromotionRow]) -> list[PromotionRow]:
    """The promotions still standing, the champion's last: a roll back takes the newest one away."""
    standing: list[PromotionRow] = []
    for entry in entries:
        if entry.action == "promote":
            standing.append(entry)
        else:
            standing.pop()
    return standing
