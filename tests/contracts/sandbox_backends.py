"""The sandbox backends that every contract and escape test runs against, and what tests do with them.

A backend joins by an entry in BACKENDS; what it cannot do it says in its capabilities.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.host.backend import NamespaceBackend
from ostinato.infra.sandbox.protocol import (
    Sandbox,
    SandboxBackend,
    SandboxKind,
    SandboxLimits,
    SandboxSpec,
)
from tests.fakes.repositories import WORDKIT, open_repository

BACKENDS: dict[str, Callable[[], SandboxBackend]] = {
    kind.value: lambda kind=kind: open_backend(kind) for kind in SandboxKind
}
BACKENDS["copies"] = lambda: NamespaceBackend(overlays=False)
MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "microvm": (pytest.mark.microvm, pytest.mark.timeout(600))
}

LIMITS = SandboxLimits(
    memory_bytes=256 << 20,
    processes=48,
    file_bytes=16 << 20,
    writable_bytes=32 << 20,
    start_seconds=60.0,
)
COMMAND_SECONDS = 40.0  # an honest end comes far sooner; the machine may be loaded


def wordkit_spec(
    files: Mapping[str, bytes | None] | None = None, repository: Path | None = None
) -> SandboxSpec:
    """A sandbox with the tiny repository."""
    directory = repository or open_repository(WORDKIT).directory
    return SandboxSpec(repository=directory, files=files or {}, limits=LIMITS)


def backend_parameters() -> list:
    """Names for a parametrised fixture, with the marks of each."""
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in BACKENDS]


def box_fixtures() -> tuple:
    """Fixtures of a module's `bench`: a box shared by tests that leave nothing behind which another
    could stumble over, and a fresh one.
    """

    @pytest.fixture(scope="module")
    def shared(bench: "Bench") -> Sandbox:
        return bench.create()

    @pytest.fixture
    def fresh(bench: "Bench") -> Iterator[Sandbox]:
        sandbox = bench.create()
        yield sandbox
        bench.run(sandbox.close())

    return shared, fresh


@contextmanager
def running_bench(make: Callable[[], SandboxBackend]) -> "Iterator[Bench]":
    """A bench of a backend that is made, and ended, on a loop of its own."""
    with asyncio.Runner() as runner:

        async def make_on_the_loop() -> SandboxBackend:
            return make()

        backend = runner.run(make_on_the_loop())
        yield Bench(runner, backend)
        runner.run(backend.close())


class Bench:
    """A backend with its event loop, for tests that are plain functions."""

    def __init__(self, runner: asyncio.Runner, backend: SandboxBackend) -> None:
        self.run = runner.run
        self.backend = backend

    def create(self, files: Mapping[str, bytes | None] | None = None) -> Sandbox:
        """A fresh sandbox of the tiny repository."""
        return self.run(self.backend.create(wordkit_spec(files)))

    def shell(self, sandbox: Sandbox, command: str, seconds: float = COMMAND_SECONDS) -> bytes:
        """Output of a shell command."""
        return self.run(sandbox.exec(command, seconds)).output

    def is_usable(self, sandbox: Sandbox, seconds: float = COMMAND_SECONDS) -> bool:
        """Whether a command still runs and a file is still written."""
        self.run(sandbox.write("/tmp/probe", b"ok"))
        return self.shell(sandbox, "cat /tmp/probe", seconds) == b"ok"
