"""Test runs in boxes that hold no other state of the repository than the run's own.

`FreshRuns`: a box has imported pytest and nothing of the repository. Each run brings all Python files that it may see
and imports them in a process of its own (inside/fresh_server.py), so that no process which runs a change ever held what
the change replaces.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH, BoxProcess
from ostinato.infra.sandbox.host.channel import BoxChannel
from ostinato.infra.sandbox.host.system import mask_paths
from ostinato.infra.sandbox.memory import copy_repository
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.snapshots.store import is_hidden

QUEUE_SECONDS = 600.0
_MARK_OF_A_TEST = b"def test"


class Learnt:
    """Work of one run on the pristine files that no later one does again: names of modules of the standard library, which
    a box imports before it forks; compiled code of files, for runs that have the same text; and where in its
    file's code a test is: qualified name, first line.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        codes: Mapping[str, bytes] | None = None,
        test_places: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        self.modules = modules
        self.codes = codes or {}
        self.test_places = test_places or {}


class FreshRuns:
    """Boxes for test runs of one repository. A box has one run at a time. A lost box is replaced. Belongs to one
    event loop.
    """

    def __init__(
        self,
        repository: PreparedRepository,
        limits: SandboxLimits,
        parallel_runs: int,
        *,
        hides_tests: bool,
        hash_seed: int = 0,
    ) -> None:
        """`hides_tests`: whether files that hold tests, or look like them, are blank on the disk of the box."""
        self.repository = repository
        self.learnt = Learnt()
        self._limits = limits
        self._hides_tests = hides_tests
        self._hash_seed = hash_seed
        self._turns = asyncio.Semaphore(parallel_runs)
        self._idle: list[BoxChannel] = []
        self._open: list[BoxChannel] = []

    async def close(self) -> None:
        """End the boxes."""
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
        """The reply to a run of tests on `files` alone, tried again once in a new box. SandboxLost when that is lost
        too.
        """
        sources = {path: text for path, text in files.items() if path.endswith(".py")}
        pristine, codes = self.repository.files, self.learnt.codes
        compiled = [path for path in sources if path in codes and sources[path] == pristine[path]]
        places = self.learnt.test_places
        blobs = (*sources.values(), *(codes[path] for path in compiled))
        async with self._turns:
            for attempt in (1, 2):
                channel = self._idle.pop() if self._idle else await self._start_box()
                is_spent = True  # a run that is given up goes on in its box
                try:
                    reply, _ = await channel.request(
                        "run",
                        QUEUE_SECONDS + time_limit_seconds,
                        blobs,
                        time_limit_seconds=time_limit_seconds,
                        tests=list(test_ids),
                        paths=list(sources),
                        compiled=compiled,
                        modules=list(self.learnt.modules),
                        test_places={test: places[test] for test in test_ids if test in places},
                        **fields,
                    )
                    is_spent = False
                    return reply
                except SandboxLost:
                    if attempt == 2:
                        raise
                finally:
                    if channel.is_lost or is_spent:
                        await self._discard(channel)
                    else:
                        self._idle.append(channel)
        raise AssertionError("unreachable")

    async def _start_box(self) -> BoxChannel:
        paths = self.repository.files if self._hides_tests else ()
        tests = [path for path in paths if self._holds_tests(path)]
        mounts = blank_mounts(self.repository, tests)
        # proofs look at a second order of sets; the box's own seed is 0
        variables = {"PYTHONHASHSEED": str(self._hash_seed)}
        box = BoxProcess(self._limits, mounts, server="fresh_server", environment=variables)
        channel, limits = BoxChannel(box), self._limits.model_dump()
        has_conftest = any(PurePath(path).name == "conftest.py" for path in self.repository.files)
        given = {"limits": limits, "has_conftest": has_conftest}
        try:
            await channel.request("open", self._limits.start_seconds, **given)
        except BaseException:
            await channel.close()
            raise
        self._open.append(channel)
        return channel

    async def _discard(self, channel: BoxChannel) -> None:
        with contextlib.suppress(ValueError):  # `close` has it already
            self._open.remove(channel)
        await channel.close()

    def _holds_tests(self, path: str) -> bool:
        is_code = self.repository.is_test(path) and path.endswith(".py")
        is_marked = _MARK_OF_A_TEST in self.repository.files[path]
        return is_code and (is_marked or bool(self.repository.collection_rules))


def blank_mounts(repository: PreparedRepository, others: Collection[str] = ()) -> tuple[str, ...]:
    """The repository, read-only, with product code and `others` blanked out."""
    blank = [path for path in repository.files if repository.is_editable(path) or path in others]
    folder = copy_repository(repository.directory.resolve(), is_hidden)
    return mask_paths(folder, blank, REPOSITORY_PATH)
