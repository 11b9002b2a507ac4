"""Scorecards by id: the record itself is JSON that the ledger does not read."""

from collections.abc import Sequence

from sqlalchemy import update

from ostinato.infra.platform.ledger.database import Repository
from ostinato.infra.platform.ledger.rows import ScorecardRow
from ostinato.infra.platform.ledger.tables import SCORECARDS


class ScorecardRepository(Repository):
    """Measurements of checkpoints."""

    def add(self, card: ScorecardRow) -> None:
        """Adds a scorecard. Of one with a known id only the gate's decision, if any, is updated."""
        with self._database.write() as connection:
            self._database.insert_absent(connection, SCORECARDS.table, [card.model_dump()])
            if card.passed is not None:
                connection.execute(
                    update(SCORECARDS.table)
                    .where(SCORECARDS.c.scorecard_id == card.scorecard_id)
                    .values(passed=card.passed)
                )

    def of_suite(self, suite: str, checkpoint_ids: Sequence[str]) -> list[ScorecardRow]:
        """Scorecards of these checkpoints on a suite, oldest first."""
        with self._database.read() as connection:
            return SCORECARDS.list(
                connection,
                SCORECARDS.c.suite == suite,
                SCORECARDS.c.checkpoint_id.in_(checkpoint_ids),
                order_by=SCORECARDS.c.created_at,
            )

    def of_checkpoint(self, checkpoint_id: str) -> list[ScorecardRow]:
        """All scorecards of a checkpoint, oldest first."""
        with self._database.read() as connection:
            return SCORECARDS.list(
                connection,
                SCORECARDS.c.checkpoint_id == checkpoint_id,
                order_by=SCORECARDS.c.created_at,
            )

    def get(self, scorecard_id: str) -> ScorecardRow | None:
        with self._database.read() as connection:
            return SCORECARDS.first(connection, SCORECARDS.c.scorecard_id == scorecard_id)
