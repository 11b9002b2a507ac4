"""The schema: made by migrations, equal to the models, and safe to migrate from several places."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.tables import METADATA


def test_migrated_schema_equals_the_models(ledger: Ledger) -> None:
    with ledger.database.read() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), METADATA)

    assert differences == []


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
