"""One Prefect server for the flow tests of a session, and a home of their own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_RESULTS_LOCAL_STORAGE_PATH,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

STARTS = 3


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    results = tmp_path_factory.mktemp("results")
    settings = {
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        PREFECT_RESULTS_LOCAL_STORAGE_PATH: results,
    }
    with contextlib.ExitStack() as stack:
        for start in range(STARTS):
            try:
                stack.enter_context(prefect_test_harness(server_startup_timeout=120))
                break
            except (
                httpx.ReadError
            ):  # a program of another test took the port that Prefect had found free
                if start == STARTS - 1:
                    raise
        stack.enter_context(temporary_settings(settings))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    return tmp_path
