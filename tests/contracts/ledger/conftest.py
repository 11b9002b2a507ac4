"""One migrated ledger of each kind: a SQLite file and a schema in a real PostgreSQL server."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.infra.platform.ledger import Ledger
from tests.fakes.storage import create_schema, postgres_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_socket() -> Iterator[str]:
    """The folder of a running server's socket."""
    with postgres_server() as folder:
        yield folder


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where nothing is yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/deep/ledger.db"
    return create_schema(request.getfixturevalue("postgres_socket"), f"ledger_{next(_numbers)}")


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    ledger = Ledger(ledger_url).migrate()
    yield ledger
    ledger.close()
