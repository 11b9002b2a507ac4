"""Migration of a database to the newest schema, by the first process that opens it."""

import logging
from contextlib import nullcontext
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.folders import locked
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.tables import METADATA

_SCRIPTS = Path(__file__).parent / "migrations"
_LOCK = 71_000
logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs its plug-ins


def migrate(database: Database) -> None:
    """Makes the newest schema in an empty database, or upgrades an older one, under a lock. ConfigError for a schema
    of another version of the program.
    """
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
    path = database.sqlite_path
    lock = nullcontext() if path is None else locked(path.with_name(path.name + ".migrate.lock"))
    with lock, database.write(_LOCK) as connection:
        config.attributes["connection"] = connection
        if MigrationContext.configure(connection).get_current_revision() is None:
            METADATA.create_all(connection, checkfirst=False)  # an error for tables of others
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")
