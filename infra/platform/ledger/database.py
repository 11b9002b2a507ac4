"""The connection to SQLite or Postgres, and the only place where database errors become
StorageError.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from ostinato.infra.platform.errors import ConfigError, StorageError

_BUSY_TIMEOUT_SECONDS = 30
_LOCK_POLL_SECONDS = 0.01
_CONNECT_TIMEOUT_SECONDS = 3
_FORMS = "wanted sqlite:////absolute/path or postgresql://user:password@host/database"


class Database:
    """An engine with transactions that read or write. Connects on first use."""

    def __init__(self, url: str) -> None:
        self._url = _parse(url)
        self.url = _without_password(self._url)
        self.is_sqlite = self._url.get_backend_name() == "sqlite"
        self.engine = _create_sqlite(self._url) if self.is_sqlite else _create_postgres(self._url)
        self._reader = self.engine.execution_options(read_only=True)

    @property
    def sqlite_path(self) -> Path | None:
        """The database file. None when this is Postgres or in memory."""
        name = self._url.database
        return Path(name) if self.is_sqlite and name and name != ":memory:" else None

    @contextmanager
    def write(self, lock_number: int | None = None) -> Iterator[Connection]:
        """A transaction that commits at the end. On SQLite it is the only writer; on Postgres transactions with the
        same lock number run one after another.
        """
        with self._errors("write to"), self.engine.begin() as connection:
            if lock_number is not None and not self.is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(lock_number)))
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent snapshot. Never blocks writers."""
        with self._errors("read"), self._reader.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close pooled connections. The next use connects again."""
        self.engine.dispose()

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise StorageError(f"cannot {verb} ledger {self.url}: {_explain(error)}") from error


def _explain(error: SQLAlchemyError) -> str:
    text = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    lowered = text.lower()
    if "disk is full" in lowered or "no space left" in lowered:
        return f"{text}; free space, then run again"
    if "no such table" in lowered or ("relation" in lowered and "does not exist" in lowered):
        return f"{text}; call Ledger.migrate() first"
    if "unable to open" in lowered or "readonly" in lowered:
        return f"{text}; check that the folder exists and is writable, or OSTINATO_LEDGER_URL"
    if "connection" in lowered or "host" in lowered:
        return f"unreachable ({text}); is the server up? check OSTINATO_LEDGER_URL"
    if "locked" in lowered:
        return f"{text} for {_BUSY_TIMEOUT_SECONDS} s; another process holds a long transaction"
    return f"{type(error).__name__}: {text}"


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # a password would be before the @ or among the options
        shown = url.rpartition("@")[2].partition("?")[0]
        raise ConfigError(f"ledger URL ends with {shown!r}, {_FORMS}") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise ConfigError(f"ledger URL has driver {parsed.drivername!r}, {_FORMS}")
    return parsed


def _without_password(url: URL) -> str:
    """The URL without a password, which may also be among its options."""
    return url.difference_update_query(["password", "sslpassword"]).render_as_string()


def _create_sqlite(url: URL) -> Engine:
    if url.database and url.database != ":memory:":
        try:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make the folder of ledger {url}: {error}; check OSTINATO_LEDGER_URL"
            ) from error
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_SECONDS})
    if url.database and url.database != ":memory:":
        file = Path(url.database)
        event.listen(engine, "connect", lambda *_: _keep_new_file_private(file))
    event.listen(engine, "connect", _prepare_sqlite_connection)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _keep_new_file_private(file: Path) -> None:
    """Limits an empty database file to its owner. SQLite gives its log and index the same mode."""
    with suppress(OSError):  # another user's file, or no regular file
        if file.stat().st_size == 0:
            file.chmod(0o600)


def _while_locked() -> Retrying:
    """Retries while another process creates the database. SQLite then fails at once, whatever its timeout."""
    return Retrying(
        retry=retry_if_exception(lambda error: "locked" in str(error)),
        wait=wait_fixed(_LOCK_POLL_SECONDS),
        stop=stop_after_delay(_BUSY_TIMEOUT_SECONDS),
        reraise=True,
    )


def _prepare_sqlite_connection(dbapi_connection: Any, _record: object) -> None:
    # the driver would begin lazily and deadlock read-then-write; _begin_sqlite does it instead
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    for attempt in _while_locked():
        with attempt:
            cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    is_reader = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")


def _create_postgres(url: URL) -> Engine:
    try:
        return create_engine(
            url,
            pool_pre_ping=True,
            connect_args={"connect_timeout": _CONNECT_TIMEOUT_SECONDS},
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"ledger URL {_without_password(url)} needs the package {error.name}, which is not installed; "
            "install ostinato[postgres]"
        ) from None
