"""Scorecards by id: the record itself is JSON that the ledger does not read."""

from typing import Any

from sqlalchemy import select, update

from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.models import ScorecardTable
from ostinato.infra.platform.ledger.rows import ScorecardRow


class ScorecardRepository:
    """Measurements of checkpoints."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        scorecard_id: str,
        *,
        checkpoint_id: str,
        suite: str,
        payload: dict[str, Any],
        created_at: float,
        passed: bool | None = None,
    ) -> None:
        """Add a scorecard. A known id changes nothing."""
        row = {
            "scorecard_id": scorecard_id,
            "checkpoint_id": checkpoint_id,
            "suite": suite,
            "payload": payload,
            "passed": passed,
            "created_at": created_at,
        }
        with self._database.write() as connection:
            self._database.insert_absent(connection, ScorecardTable, [row])

    def set_passed(self, scorecard_id: str, passed: bool) -> None:
        """Note the gate's word."""
        with self._database.write() as connection:
            connection.execute(
                update(ScorecardTable)
                .where(ScorecardTable.scorecard_id == scorecard_id)
                .values(passed=passed)
            )

    def get(self, scorecard_id: str) -> ScorecardRow | None:
        """One scorecard."""
        with self._database.read() as connection:
            found = connection.execute(
                select(ScorecardTable.__table__).where(ScorecardTable.scorecard_id == scorecard_id)
            ).first()
        return ScorecardRow.model_validate(found) if found is not None else None
