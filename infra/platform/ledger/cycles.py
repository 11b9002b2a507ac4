"""Rounds of the real-time loop: which interactions each one took, and what its stages left.

It runs nothing.
"""

import time
from typing import Any

from sqlalchemy import Connection, func, select, update

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.models import CycleTable
from ostinato.infra.platform.ledger.rows import CycleRow

_LOCK = 71_005


class CycleRepository:
    """Cycles, open and closed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(
        self,
        cycle_id: str,
        *,
        line: str,
        served: str,
        from_watermark: int,
        to_watermark: int,
        at: float,
    ) -> CycleRow:
        """Start a line's cycle over (from_watermark, to_watermark]. The row that is there if the id
        is known. Another open cycle of the line raises StorageError.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            known = _find(connection, CycleTable.cycle_id == cycle_id)
            if known is not None:
                return known
            other = _find(connection, *_is_open(line))
            if other is not None:
                raise StorageError(
                    f"cycle {cycle_id} cannot open: cycle {other.cycle_id} is open since "
                    f"{other.opened_at:.0f}, wanted none; close that one first"
                )
            row = {
                "cycle_id": cycle_id,
                "line": line,
                "served": served,
                "from_watermark": from_watermark,
                "to_watermark": to_watermark,
                "stages": {},
                "opened_at": at,
            }
            self._database.insert_absent(connection, CycleTable, [row])
            return _require(connection, cycle_id)

    def update(self, cycle_id: str, stage: str, payload: dict[str, Any]) -> None:
        """Note what a stage left, replacing what it left before."""
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            stages = {**_require(connection, cycle_id).stages, stage: payload}
            connection.execute(
                update(CycleTable).where(CycleTable.cycle_id == cycle_id).values(stages=stages)
            )

    def close(self, cycle_id: str, outcome: str, at: float | None = None) -> None:
        """End a cycle. A cycle that is closed keeps its first outcome."""
        with self._database.write() as connection:
            _require(connection, cycle_id)
            connection.execute(
                update(CycleTable)
                .where(CycleTable.cycle_id == cycle_id, CycleTable.closed_at.is_(None))
                .values(outcome=outcome, closed_at=time.time() if at is None else at)
            )

    def get(self, cycle_id: str) -> CycleRow | None:
        """One cycle."""
        with self._database.read() as connection:
            return _find(connection, CycleTable.cycle_id == cycle_id)

    def open_cycle(self, line: str) -> CycleRow | None:
        """The line's cycle under way, if any."""
        with self._database.read() as connection:
            return _find(connection, *_is_open(line))

    def last_closed_watermark(self, line: str) -> int:
        """Up to where interactions were taken by the line's closed cycles. 0 at first."""
        with self._database.read() as connection:
            return (
                connection.scalar(
                    select(func.max(CycleTable.to_watermark)).where(
                        CycleTable.line == line, CycleTable.closed_at.is_not(None)
                    )
                )
                or 0
            )

    def history(self, line: str) -> list[CycleRow]:
        """All cycles of a line, oldest first."""
        with self._database.read() as connection:
            found = connection.execute(
                select(CycleTable.__table__)
                .where(CycleTable.line == line)
                .order_by(CycleTable.opened_at, CycleTable.cycle_id)
            ).all()
        return [CycleRow.model_validate(row) for row in found]


def _is_open(line: str) -> tuple[Any, Any]:
    return CycleTable.line == line, CycleTable.closed_at.is_(None)


def _find(connection: Connection, *conditions: Any) -> CycleRow | None:
    found = connection.execute(select(CycleTable.__table__).where(*conditions)).first()
    return CycleRow.model_validate(found) if found is not None else None


def _require(connection: Connection, cycle_id: str) -> CycleRow:
    found = _find(connection, CycleTable.cycle_id == cycle_id)
    if found is None:
        raise StorageError(f"cycle {cycle_id!r} is not in the ledger, wanted an opened one")
    return found
