"""One event loop and one box for all contract tests; each test gets the box clean."""

import asyncio
from collections.abc import Iterator

import pytest

from ostinato.infra.sandbox import NamespaceSandbox, SandboxLimits
from tests.fakes.repositories import WORDKIT, open_repository

LIMITS = SandboxLimits(
    memory_bytes=256 << 20, processes=48, file_bytes=8 << 20, writable_bytes=32 << 20
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def open_box(runner: asyncio.Runner) -> Iterator[NamespaceSandbox]:
    sandbox = runner.run(NamespaceSandbox.open(open_repository(WORDKIT), LIMITS))
    yield sandbox
    runner.run(sandbox.close())


@pytest.fixture
def box(runner: asyncio.Runner, open_box: NamespaceSandbox) -> NamespaceSandbox:
    runner.run(open_box.reset())
    return open_box
