"""The fake repositories with their test servers."""

import asyncio
from collections.abc import Iterator

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from tests.fakes.repositories import LEDGERKIT, WORDKIT, open_repository, running_server


@pytest.fixture(scope="session")
def wordkit() -> PreparedRepository:
    return open_repository(WORDKIT)


@pytest.fixture(scope="session")
def ledgerkit() -> PreparedRepository:
    return open_repository(LEDGERKIT)


@pytest.fixture(scope="module")
def word_server(runner: asyncio.Runner, wordkit: PreparedRepository) -> Iterator[TestServer]:
    with running_server(runner, wordkit) as server:
        yield server


@pytest.fixture(scope="module")
def ledger_server(runner: asyncio.Runner, ledgerkit: PreparedRepository) -> Iterator[TestServer]:
    with running_server(runner, ledgerkit) as server:
        yield server
