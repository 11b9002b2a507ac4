"""Rounds of the real-time loop: which interactions each one took, and what its stages left."""

import time
from typing import Any

from sqlalchemy import ColumnElement, Connection, update

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Repository
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.infra.platform.ledger.tables import CYCLES

_LOCK = 71_006


class CycleRepository(Repository):
    """Cycles, open and closed."""

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
        """Starts a line's cycle over (from_watermark, to_watermark], or returns the row of a known id.
        Another open cycle of the line raises StorageError.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            known = CYCLES.first(connection, CYCLES.c.cycle_id == cycle_id)
            if known is not None:
                return known
            other = CYCLES.first(connection, *_is_open(line))
            if other is not None:
                raise StorageError(
                    f"cycle {cycle_id} cannot open: cycle {other.cycle_id} is open since "
                    f"{other.opened_at:.0f}, wanted none; close that one first"
                )
            cycle = CycleRow(
                cycle_id=cycle_id,
                line=line,
                served=served,
                from_watermark=from_watermark,
                to_watermark=to_watermark,
                opened_at=at,
            )
            self._database.insert_absent(connection, CYCLES.table, [cycle.model_dump()])
            return cycle

    def update(self, cycle_id: str, stage: str, payload: dict[str, Any]) -> None:
        """Stores the payload of a stage, replacing an earlier one."""
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            stages = {**_require(connection, cycle_id).stages, stage: payload}
            connection.execute(
                update(CYCLES.table).where(CYCLES.c.cycle_id == cycle_id).values(stages=stages)
            )

    def close(self, cycle_id: str, outcome: str, at: float | None = None) -> None:
        """End a cycle. A cycle that is closed keeps its first outcome."""
        with self._database.write() as connection:
            _require(connection, cycle_id)
            connection.execute(
                update(CYCLES.table)
                .where(CYCLES.c.cycle_id == cycle_id, CYCLES.c.closed_at.is_(None))
                .values(outcome=outcome, closed_at=time.time() if at is None else at)
            )

    def open_cycle(self, line: str) -> CycleRow | None:
        """The line's cycle under way, if any."""
        with self._database.read() as connection:
            return CYCLES.first(connection, *_is_open(line))

    def last_closed_watermark(self, line: str) -> int:
        """Highest watermark of the line's closed cycles. 0 without any."""
        is_closed = CYCLES.c.closed_at.is_not(None)
        with self._database.read() as connection:
            return CYCLES.highest(connection, "to_watermark", CYCLES.c.line == line, is_closed)

    def history(self, line: str) -> list[CycleRow]:
        """All cycles of a line, oldest first."""
        order = (CYCLES.c.opened_at, CYCLES.c.cycle_id)
        with self._database.read() as connection:
            return CYCLES.list(connection, CYCLES.c.line == line, order_by=order)


def _is_open(line: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return CYCLES.c.line == line, CYCLES.c.closed_at.is_(None)


def _require(connection: Connection, cycle_id: str) -> CycleRow:
    found = CYCLES.first(connection, CYCLES.c.cycle_id == cycle_id)
    if found is None:
        raise StorageError(f"cycle {cycle_id!r} is not in the ledger, wanted an opened one")
    return found
