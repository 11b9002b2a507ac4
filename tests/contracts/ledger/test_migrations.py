"""The schema: made by migrations, equal to the models, and safe to migrate from several places."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.models import Base


def test_migrated_schema_equals_the_models(ledger: Ledger) -> None:
    with ledger.database.read() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)

    assert differences == []


def test_migrate_from_several_ledgers_at_once_runs_once(ledger_url: str) -> None:
    ledgers = [Ledger(ledger_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(Ledger.migrate, ledgers))

    for ledger in ledgers:
        assert ledger.journal.counts("run")["reserved"] == 0
        ledger.close()


def test_champion_of_an_older_ledger_is_kept_under_a_line_that_no_recipe_names(
    ledger_url: str,
) -> None:
    ledger = Ledger(ledger_url)
    ledger.migrate("0001")
    with ledger.database.write() as connection:
        for statement in (
            "INSERT INTO promotions (action, state, to_checkpoint_id, reason, at)"
            " VALUES ('promote', 'closed', 'a', '', 1.0), ('promote', 'undone', 'b', '', 2.0)",
            "INSERT INTO champion (slot, checkpoint_id, entry_id, reason, at)"
            " VALUES ('champion', 'a', 1, '', 1.0)",
        ):
            connection.execute(text(statement))
    ledger.migrate()
    assert ledger.promotions.lines() == ["champion"]
    [entry] = ledger.promotions.history("champion")
    assert entry.to_checkpoint_id == "a"
    ledger.close()


def test_use_before_migrate_says_so(ledger_url: str) -> None:
    ledger = Ledger(ledger_url)
    with pytest.raises(StorageError, match=r"call Ledger\.migrate\(\) first"):
        ledger.cycles.open_cycle("nano")
    ledger.close()
