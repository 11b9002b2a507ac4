"""The schema: new or migrated, equal to the models, and safe to migrate from several places."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.tables import METADATA

_FIRST_SCHEMA = Path(__file__).with_name("first_schema.sql")


def _differences(ledger: Ledger) -> list[object]:
    with ledger.database.read() as connection:
        return compare_metadata(MigrationContext.configure(connection), METADATA)


def test_new_schema_equals_the_models(ledger: Ledger) -> None:
    assert _differences(ledger) == []


def test_first_schema_is_migrated_to_the_models_and_keeps_its_rows(ledger_url: str) -> None:
    ledger = Ledger(ledger_url)
    is_sqlite = ledger.database.is_sqlite
    numbered, floating = ("INTEGER", "DOUBLE") if is_sqlite else ("BIGSERIAL", "DOUBLE PRECISION")
    schema = _FIRST_SCHEMA.read_text().replace("NUMBERED", numbered).replace("FLOATING", floating)
    with ledger.database.write() as connection:
        for statement in schema.split(";")[:-1]:
            connection.execute(text(statement))

    ledger.migrate()

    assert _differences(ledger) == []
    (row,) = ledger.interactions.since(0)
    assert (row.interaction_id, row.checkpoint_id) == ("old", "")
    ledger.close()


def test_tables_of_another_program_are_not_taken_over(ledger_url: str) -> None:
    ledger = Ledger(ledger_url)
    with ledger.database.write() as connection:
        connection.execute(text("CREATE TABLE events (name VARCHAR)"))

    with pytest.raises(StorageError, match="events"):
        ledger.migrate()
    ledger.close()


def test_migrate_from_several_ledgers_at_once_runs_once(ledger_url: str) -> None:
    ledgers = [Ledger(ledger_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(Ledger.migrate, ledgers))

    for ledger in ledgers:
        assert ledger.journal.counts("run")["reserved"] == 0
        ledger.close()


def test_use_before_migrate_says_so(ledger_url: str) -> None:
    ledger = Ledger(ledger_url)
    with pytest.raises(StorageError, match=r"call Ledger\.migrate\(\) first"):
        ledger.cycles.open_cycle("nano")
    ledger.close()


def test_ledger_of_another_version_says_what_to_do(ledger: Ledger) -> None:
    with ledger.database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))

    with pytest.raises(ConfigError, match=r"another version of Ostinato .*'0001'.*OSTINATO_HOME"):
        Ledger(ledger.url).migrate()
