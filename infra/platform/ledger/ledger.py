"""The ledger: one database, one repository for each kind of row, and its migrations.

`migrate()` must have run once on a database before rows are read or written; it is cheap when there
is nothing to do.
"""

from ostinato.infra.platform.ledger.artifacts import ArtifactRepository
from ostinato.infra.platform.ledger.cycles import CycleRepository
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.events import EventRepository
from ostinato.infra.platform.ledger.interactions import InteractionRepository
from ostinato.infra.platform.ledger.journal import JournalRepository
from ostinato.infra.platform.ledger.promotions import PromotionRepository
from ostinato.infra.platform.ledger.scorecards import ScorecardRepository
from ostinato.infra.platform.settings import Settings


class Ledger:
    """All repositories over one database. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.url = self.database.url
        self.events = EventRepository(self.database)
        self.artifacts = ArtifactRepository(self.database)
        self.journal = JournalRepository(self.database)
        self.scorecards = ScorecardRepository(self.database)
        self.promotions = PromotionRepository(self.database)
        self.interactions = InteractionRepository(self.database)
        self.cycles = CycleRepository(self.database)

    def migrate(self) -> "Ledger":
        """Brings the schema to the newest revision. Safe from several processes."""
        # Alembic takes 0.3 s to import, and commands that only read a recipe need none of it
        from ostinato.infra.platform.ledger.migration import migrate  # noqa: PLC0415

        migrate(self.database)
        return self

    def close(self) -> None:
        self.database.close()


def open_ledger(settings: Settings) -> Ledger:
    """The ledger that the settings name, migrated."""
    return Ledger(settings.ledger_url).migrate()
