"""Events: alarms, promotions, canaries, as they happened."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, insert

from ostinato.infra.platform.ledger.database import Repository
from ostinato.infra.platform.ledger.rows import EventRow
from ostinato.infra.platform.ledger.tables import EVENTS
from ostinato.infra.platform.record import finite

_LOCK = 71_005


class EventRepository(Repository):
    """Events, append only."""

    def add(self, source: str, name: str, payload: dict[str, Any], at: float) -> None:
        """Appends an event. Numbers that JSON lacks (NaN, infinity) are kept as text."""
        with self._database.write() as connection:
            _insert(connection, source, name, payload, at)

    def add_once(
        self, source: str, name: str, payload: dict[str, Any], at: float, *, key: str
    ) -> bool:
        """Appends an event unless the source has one of that name with the same `payload[key]`. Whether
        it did: of several that try at once, one does.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _LOCK)
            alike = (EVENTS.c.source == source, EVENTS.c.name == name)
            known = EVENTS.list(connection, *alike, order_by=EVENTS.c.event_id)
            if any(event.payload.get(key) == payload[key] for event in known):
                return False
            _insert(connection, source, name, payload, at)
            return True

    def recent(
        self,
        source: str | None = None,
        limit_rows: int | None = 100,
        names: Collection[str] | None = None,
    ) -> list[EventRow]:
        """Newest first, all of them without a limit."""
        wanted = [] if source is None else [EVENTS.c.source == source]
        if names is not None:
            wanted.append(EVENTS.c.name.in_(names))
        newest = EVENTS.c.event_id.desc()
        with self._database.read() as connection:
            return EVENTS.list(connection, *wanted, order_by=newest, limit_rows=limit_rows)


def _insert(
    connection: Connection, source: str, name: str, payload: dict[str, Any], at: float
) -> None:
    values = {"source": source, "name": name, "payload": finite(payload), "at": at}
    connection.execute(insert(EVENTS.table).values(values))
