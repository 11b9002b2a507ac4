"""Environment of Prefect's processes."""

import os
from pathlib import Path

import pytest

from ostinato.flows.operating import local_prefect
from ostinato.flows.operating.local_prefect import (
    prefect_environment,
    server_service,
)
from ostinato.infra.platform.settings import Settings


def test_plug_ins_on_the_python_path_of_the_user_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/plugins")
    environment = {**os.environ, **prefect_environment(Settings(home=tmp_path), 4200)}
    assert environment["PYTHONPATH"] == "/somewhere/plugins"


def test_a_database_begins_as_the_empty_one_and_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty.db"
    empty.write_bytes(b"no rows")
    monkeypatch.setattr(local_prefect, "_EMPTY_DATABASE", empty)
    settings = Settings(home=tmp_path / "home")
    environment = prefect_environment(settings, 4200)
    database = Path(environment["PREFECT_HOME"]) / "prefect.db"
    server_service(settings, 4200, environment)
    assert database.read_bytes() == b"no rows"
    database.write_bytes(b"rows")
    server_service(settings, 4200, environment)
    assert database.read_bytes() == b"rows"
    assert [path.name for path in database.parent.iterdir()] == ["prefect.db"]
