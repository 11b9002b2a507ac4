"""One object store of each kind: a local directory and a bucket behind a real S3 protocol
server.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import Settings
from tests.fakes.storage import BUCKET, s3_server


@pytest.fixture(scope="session")
def s3_settings() -> Iterator[Settings]:
    with s3_server() as settings:
        yield settings


@pytest.fixture(params=["file", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return ObjectStore.from_url(f"file://{tmp_path}/objects")
    settings = request.getfixturevalue("s3_settings")
    return ObjectStore.from_url(f"s3://{BUCKET}/{tmp_path.name}", settings)
