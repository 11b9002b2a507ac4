"""The ledger: one database, one repository for each kind of row, and its migrations.

`migrate()` must have run once on a database before rows are read or written; it is cheap when there
is nothing to do.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger.artifacts import ArtifactRepository
from ostinato.infra.platform.ledger.cycles import CycleRepository
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.events import EventRepository
from ostinato.infra.platform.ledger.interactions import InteractionRepository
from ostinato.infra.platform.ledger.journal import JournalRepository
from ostinato.infra.platform.ledger.promotions import PromotionRepository
from ostinato.infra.platform.ledger.scorecards import ScorecardRepository
from ostinato.infra.platform.settings import Settings

_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 71_000


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
        """Brings the schema to a revision (default: newest). Safe from several processes."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        scripts = ScriptDirectory.from_config(config)
        known = {script.revision for script in scripts.walk_revisions()}
        with self.database.read() as connection:
            revision = _revision(connection)
        if revision == scripts.get_current_head():
            return self
        if revision is not None and revision not in known:
            raise ConfigError(
                f"ledger {self.url} was made by another version of Ostinato (schema {revision!r}, "
                f"wanted one of {sorted(known)}): nothing of it can be used again. Move its home "
                "away, for example mv HOME HOME.old, or name a new one in OSTINATO_HOME, and run "
                "the same command"
            )
        with self._file_lock(), self.database.write() as connection:
            self.database.serialize(connection, _MIGRATION_LOCK)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return self

    def close(self) -> None:
        self.database.close()

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        path = self.database.sqlite_path
        if path is None:
            yield
            return
        with path.with_name(path.name + ".migrate.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def open_ledger(settings: Settings) -> Ledger:
    """The ledger that the settings name, migrated."""
    return Ledger(settings.ledger_url).migrate()
