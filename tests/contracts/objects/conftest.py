"""One object store of each kind: a local directory and a bucket behind a real S3 protocol
server.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from pydantic import SecretStr

from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.objects.s3 import S3Options


@pytest.fixture(scope="session")
def s3_options() -> Iterator[S3Options]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # moto takes any credentials
    options = S3Options(
        endpoint_url=f"http://{host}:{port}",
        region="eu-west-1",
        access_key_id="test",
        secret_access_key=SecretStr("test"),
    )
    files = fsspec.filesystem(
        "s3",
        key="test",
        secret="test",
        endpoint_url=options.endpoint_url,
        client_kwargs={"region_name": options.region},
    )
    files.mkdir("contracts")
    yield options
    server.stop()


@pytest.fixture(params=["file", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return ObjectStore.from_url(f"file://{tmp_path}/objects")
    options = request.getfixturevalue("s3_options")
    return ObjectStore.from_url(f"s3://contracts/{tmp_path.name}", options)
