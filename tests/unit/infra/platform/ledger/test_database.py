"""Failures under the ledger: each is one message with the URL and what to do, and loses no row."""

import importlib
import pkgutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from ostinato.infra.platform import ledger
from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.journal import Reservation

_WRITER = """
import itertools, sys
from ostinato.infra.platform.ledger import Ledger
from tests.unit.infra.platform.ledger.test_database import reservation
journal = Ledger(sys.argv[1]).journal
for number in itertools.count():
    journal.reserve("run", [reservation(f"t{number}")])
    print(number, flush=True)
"""


def reservation(trajectory_id: str) -> Reservation:
    """A row of the journal."""
    return Reservation(
        group_id="g", trajectory_id=trajectory_id, problem_id="problem", weight_version=1
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.mark.parametrize("bad", ["", "ledger.db", "mysql://host/database", "sqlite+other:///x"])
def test_wrong_url_says_what_is_wanted(bad: str) -> None:
    with pytest.raises(ConfigError, match="wanted sqlite:"):
        Ledger(bad)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql//user:hunter2@host/ledger",
        "postgresql://user:hunter2@host:port/ledger",
        "mysql://user:hunter2@host/ledger",
        "host/ledger?password=hunter2",
    ],
)
def test_a_wrong_url_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="wanted sqlite:") as caught:
        Ledger(url)
    assert "hunter2" not in str(caught.value)


def test_a_password_among_the_options_is_not_shown() -> None:
    ledger = Ledger(
        SecretStr("postgresql://user@127.0.0.1:9/ledger?password=hunter2&sslmode=disable")
    )
    assert ledger.url.endswith("sslmode=disable")
    assert "hunter2" not in ledger.url


def test_closed_port_fails_at_once_without_showing_the_password() -> None:
    began = time.monotonic()
    with socket.socket() as deaf:  # holds the port and does not listen
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        ledger = Ledger(f"postgresql://user:hunter2@127.0.0.1:{port}/ledger")
        with pytest.raises(StorageError, match=r"unreachable.*OSTINATO_LEDGER_URL") as caught:
            ledger.migrate()

    assert time.monotonic() - began < 60
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_full_disk_says_so_and_keeps_what_was_committed(url: str) -> None:
    ledger = Ledger(url).migrate()
    ledger.journal.reserve("run", [reservation("kept")])
    with ledger.database.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 1}")

    with pytest.raises(StorageError, match=f"cannot write to ledger {url}.*full; free space"):
        ledger.events.add("big", "demo", {"text": "x" * 100_000}, 1.0)
    assert [row.trajectory_id for row in ledger.journal.rows("run")] == ["kept"]


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot make the folder of ledger .*taken"):
        Ledger(f"sqlite:///{tmp_path}/taken/ledger.db")


def test_damaged_database_is_a_storage_error(tmp_path: Path, url: str) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database, " * 100)
    with pytest.raises(StorageError, match="not a database"):
        Ledger(url).migrate()


def test_killed_writer_loses_no_row_that_was_acknowledged(url: str) -> None:
    ledger = Ledger(url).migrate()
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, url], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for _ in range(20):
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()

    names = {row.trajectory_id for row in ledger.journal.rows("run")}
    assert {f"t{number}" for number in range(last + 1)} <= names
    ledger.journal.reserve("run", [reservation("next")])


def test_reader_is_not_blocked_by_an_open_writer(url: str) -> None:
    ledger = Ledger(url).migrate()
    ledger.journal.reserve("run", [reservation("t")])
    with ledger.database.write():
        assert ledger.journal.counts("run")["reserved"] == 1


def test_first_connection_waits_for_another_process_that_makes_the_database(tmp_path: Path) -> None:
    """SQLite answers the change to a write-ahead log at once with "locked", whatever the timeout."""
    other = sqlite3.connect(tmp_path / "l.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.rollback)
    release.start()
    with Database(f"sqlite:///{tmp_path}/l.db").read() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    release.join()
    other.close()


def test_every_lock_of_the_ledger_has_its_own_number() -> None:
    modules = pkgutil.iter_modules(ledger.__path__, f"{ledger.__name__}.")
    numbers = [
        number
        for module in modules
        for name, number in vars(importlib.import_module(module.name)).items()
        if name.endswith("_LOCK")
    ]
    assert len(set(numbers)) == len(numbers) >= 7
