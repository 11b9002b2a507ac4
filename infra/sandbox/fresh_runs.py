"""Test runs in boxes that hold no state of the repository other than the run's own.

The server of a box has imported pytest and nothing of the repository. Each run is sent all Python files that it may see
and imports them in a new process (inside/fresh_server.py), so that no process that runs a change ever held the code
which the change replaces.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH, BoxProcess
from ostinato.infra.sandbox.host.channel import BoxChannel
from ostinato.infra.sandbox.host.system import mask_paths
from ostinato.infra.sandbox.memory import copy_repository
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.snapshots.store import is_hidden

QUEUE_SECONDS = 600.0
_TEST_MARKER = b"def test"


class CollectionCache(NamedTuple):
    """Results of collecting the pristine tests that later runs reuse."""

    modules: Sequence[str]  # of the standard library, which a box imports before it forks
    codes: Mapping[str, bytes]  # compiled code of files, for runs with the same text
    test_places: Mapping[str, tuple[str, int]]  # name and first line of each test in that code


class FreshRuns:
    """Boxes for test runs of one repository. A box has one run at a time, and a lost box is replaced. Belongs to
    one event loop.
    """

    def __init__(
        self,
        repository: PreparedRepository,
        limits: SandboxLimits,
        parallel_runs: int,
        *,
        hides_tests: bool,
        hash_seed: int = 0,
        tests_may_write: bool = False,
    ) -> None:
        """`hides_tests`: whether files that hold tests or look like tests are empty on the disk of the box.
        `tests_may_write`: as for TestServer.
        """
        self.repository = repository
        self.collected = CollectionCache((), {}, {})
        self._limits = limits
        self._hides_tests = hides_tests
        self._hash_seed = hash_seed
        self._tests_may_write = tests_may_write
        self._turns = asyncio.Semaphore(parallel_runs)
        self._idle: list[BoxChannel] = []
        self._open: list[BoxChannel] = []

    async def close(self) -> None:
        """Ends the boxes."""
        self._idle.clear()
        while self._open:
            await self._open.pop().close()

    async def run(
        self,
        files: Mapping[str, bytes],
        test_ids: Sequence[str],
        time_limit_seconds: float,
        **fields: Any,
    ) -> dict[str, Any]:
        """The reply to a run of tests on `files` alone. A run whose box was lost is repeated once in a new box, and
        raises SandboxLost when that box is lost too.
        """
        sources = {path: text for path, text in files.items() if path.endswith(".py")}
        pristine, codes = self.repository.files, self.collected.codes
        compiled = [path for path in sources if path in codes and sources[path] == pristine[path]]
        places = self.collected.test_places
        blobs = (*sources.values(), *(codes[path] for path in compiled))
        async with self._turns:
            for attempt in (1, 2):
                channel = None
                is_spent = True  # a cancelled request leaves its run going in the box
                try:
                    channel = self._idle.pop() if self._idle else await self._start_box()
                    reply, _ = await channel.request(
                        "run",
                        QUEUE_SECONDS + time_limit_seconds,
                        blobs,
                        time_limit_seconds=time_limit_seconds,
                        tests=list(test_ids),
                        paths=list(sources),
                        compiled=compiled,
                        modules=list(self.collected.modules),
                        test_places={test: places[test] for test in test_ids if test in places},
                        **fields,
                    )
                    is_spent = False
                    return reply
                except SandboxLost:
                    if attempt == 2:
                        raise
                finally:
                    if channel is not None and (channel.is_lost or is_spent):
                        await self._discard(channel)
                    elif channel is not None:
                        self._idle.append(channel)
        raise AssertionError("unreachable")

    async def _start_box(self) -> BoxChannel:
        paths = self.repository.files if self._hides_tests else ()
        tests = [path for path in paths if self._holds_tests(path)]
        mounts = blank_mounts(self.repository, tests)
        # Proofs repeat runs with a second seed, to find results that depend on the order of sets.
        variables = {"PYTHONHASHSEED": str(self._hash_seed)}
        box = BoxProcess(
            self._limits,
            mounts,
            server="fresh_server",
            tests_may_write=self._tests_may_write,
            environment=variables,
        )
        channel, limits = BoxChannel(box), self._limits.model_dump()
        has_conftest = any(PurePath(path).name == "conftest.py" for path in self.repository.files)
        try:
            await channel.request(
                "open",
                self._limits.start_seconds,
                limits=limits,
                has_conftest=has_conftest,
                tests_may_write=self._tests_may_write,
            )
        except BaseException:
            await channel.close()
            raise
        self._open.append(channel)
        return channel

    async def _discard(self, channel: BoxChannel) -> None:
        with contextlib.suppress(ValueError):  # `close` took it first
            self._open.remove(channel)
        await channel.close()

    def _holds_tests(self, path: str) -> bool:
        is_code = self.repository.is_test(path) and path.endswith(".py")
        is_marked = _TEST_MARKER in self.repository.files[path]
        return is_code and (is_marked or bool(self.repository.collection_rules))


def blank_mounts(repository: PreparedRepository, others: Collection[str] = ()) -> tuple[str, ...]:
    """Bubblewrap arguments for the repository, read-only, with product code and `others` as empty files."""
    blank = [path for path in repository.files if repository.is_editable(path) or path in others]
    folder = copy_repository(repository.directory.resolve(), is_hidden)
    return mask_paths(folder, blank, REPOSITORY_PATH)
