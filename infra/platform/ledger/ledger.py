"""The ledger: one database, one repository for each kind of row, and its migrations.

`migrate()` must have run once on a database before rows are read or written; it is cheap when there
is nothing to do.
"""

from pydantic import SecretStr

from ostinato.infra.platform.settings import Settings


class Ledger:
    """All repositories over one database. Safe to use from several threads."""

    def __init__(self, url: str | SecretStr) -> None:
        # SQLAlchemy takes 0.2 s to import, and commands that only read a recipe need none of it
        from ostinato.infra.platform.ledger import database, journal, repositories  # noqa: PLC0415

        secret = url.get_secret_value() if isinstance(url, SecretStr) else url
        self.database = database.Database(secret)
        self.url = self.database.url  # without a password
        self.events = repositories.EventRepository(self.database)
        self.artifacts = repositories.ArtifactRepository(self.database)
        self.journal = journal.JournalRepository(self.database)
        self.scorecards = repositories.ScorecardRepository(self.database)
        self.promotions = repositories.PromotionRepository(self.database)
        self.interactions = repositories.InteractionRepository(self.database)
        self.cycles = repositories.CycleRepository(self.database)
        self.spending = repositories.SpendingRepository(self.database)

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
