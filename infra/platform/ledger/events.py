"""Events: alarms, promotions, canaries, as they happened."""

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import insert

from ostinato.infra.platform.ledger.database import Repository
from ostinato.infra.platform.ledger.rows import EventRow
from ostinato.infra.platform.ledger.tables import EVENTS


class EventRepository(Repository):
    """Events, append only."""

    def add(self, source: str, name: str, payload: dict[str, Any], at: float) -> None:
        """Appends an event. Numbers that JSON lacks (NaN, infinity) are kept as text."""
        written = {key: _writable(value) for key, value in payload.items()}
        with self._database.write() as connection:
            connection.execute(
                insert(EVENTS.table).values(source=source, name=name, payload=written, at=at)
            )

    def recent(self, source: str | None = None, limit_rows: int = 100) -> list[EventRow]:
        """Newest first."""
        wanted = [] if source is None else [EVENTS.c.source == source]
        newest = EVENTS.c.event_id.desc()
        with self._database.read() as connection:
            return EVENTS.list(connection, *wanted, order_by=newest, limit_rows=limit_rows)


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value
