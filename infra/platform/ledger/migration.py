"""Migration of a database to the newest schema, by the first process that opens it."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger.database import Database

_SCRIPTS = Path(__file__).parent / "migrations"
_LOCK = 71_000
logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs its plug-ins


def migrate(database: Database) -> None:
    """Upgrades the schema under a lock. ConfigError for a schema of another version of the program."""
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS))
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    with database.read() as connection:
        revision = MigrationContext.configure(connection).get_current_revision()
    if revision == scripts.get_current_head():
        return
    if revision is not None and revision not in known:
        raise ConfigError(
            f"ledger {database.url} was made by another version of Ostinato (schema {revision!r}, "
            f"wanted one of {sorted(known)}) and cannot be used by this one. Move its home "
            "away, for example mv HOME HOME.old, or name a new one in OSTINATO_HOME, and run "
            "the same command"
        )
    with _file_lock(database), database.write(_LOCK) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


@contextmanager
def _file_lock(database: Database) -> Iterator[None]:
    path = database.sqlite_path
    if path is None:
        yield
        return
    with path.with_name(path.name + ".migrate.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
