"""Runs a repository's own tests on changed files in tens of milliseconds.

Each run of a `TestServer` is a new process in a box that imports the changed repository. Reports are cached by content.
Only changes of product code count: changes of tests, of runner configuration and of files other than Python are
ignored. The server returns outcomes, not rewards.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ostinato.infra.platform.errors import ProblemError, SandboxError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.fresh_runs import CollectionCache, FreshRuns
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH
from ostinato.infra.sandbox.protocol import (
    Frame,
    SandboxLimits,
    TestFailure,
    TestOutcome,
    TestReport,
)
from ostinato.infra.sandbox.repository import PreparedRepository, fingerprint_files

ReportKey = tuple[str, str, tuple[str, ...]]  # repository, changed files, tests


class TestProbe(Record):
    """Behaviour of one test on the pristine repository."""

    __test__ = False

    outcome: TestOutcome
    seconds: float
    idle_seconds: float  # part of `seconds` in which it slept or waited for other processes
    # calls of Python and built-in functions, including the runner's own; 0 when not profiled
    num_calls: int
    # path, first line and qualified name of the repository's functions that it called
    called: frozenset[tuple[str, int, str]]


_RETRY_CPU_FACTOR = 3.0  # CPU time per test in the second run, relative to the first


class VerdictCache:
    """In-memory LRU cache of reports by repository, changed files and tests."""

    def __init__(self, capacity: int = 20_000) -> None:
        self._capacity = capacity
        self._reports: OrderedDict[ReportKey, TestReport] = OrderedDict()

    def get(self, key: ReportKey) -> TestReport | None:
        """The cached report of a key. None: there is none."""
        if key in self._reports:
            self._reports.move_to_end(key)
        return self._reports.get(key)

    def put(self, key: ReportKey, report: TestReport) -> None:
        """Stores a report. Over the capacity, the least recently used one is dropped."""
        self._reports[key] = report
        if len(self._reports) > self._capacity:
            self._reports.popitem(last=False)


class TestServer:
    """Test runs of one repository in boxes. Belongs to one event loop."""

    __test__ = False

    def __init__(
        self,
        repository: PreparedRepository,
        limits: SandboxLimits | None = None,
        *,
        parallel_runs: int = 2,
        cache: VerdictCache | None = None,
        hash_seed: int = 0,
        tests_may_write: bool = False,
    ) -> None:
        """`tests_may_write`: a run writes into a copy of the repository that is gone when it ends. False: writes fail, so
        that a change which is judged cannot replace the files with which its tests compare.
        """
        self.repository = repository
        self.tests: tuple[str, ...] = ()
        self.collection_errors: tuple[str, ...] = ()
        self.cache = cache or VerdictCache()
        self._limits = limits or SandboxLimits(memory_bytes=2 << 30)

        def make_runs(*, hides_tests: bool) -> FreshRuns:
            options = {"hash_seed": hash_seed, "tests_may_write": tests_may_write}
            return FreshRuns(
                repository, self._limits, parallel_runs, hides_tests=hides_tests, **options
            )

        # These runs are sent all tests anyway, and a test may read a file that looks like a test.
        self._fresh = make_runs(hides_tests=False)
        # The disk of these boxes holds no test that an agent must not see.
        self._visible = make_runs(hides_tests=True)
        self._running: dict[ReportKey, asyncio.Task[TestReport]] = {}
        self._collecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Collects the tests of the pristine repository, once. The first run calls it if nobody has."""
        task = self._collecting
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._collecting = asyncio.create_task(self._collect())
        await asyncio.shield(task)

    async def _collect(self) -> None:
        files, paths = self.repository.files, list(self.repository.test_paths)
        reply = await self._fresh.run(files, (), self._limits.start_seconds, collect=paths)
        answer = reply["collected"] or {"tests": [], "errors": [f"the run ended: {reply['route']}"]}
        if not answer["tests"]:
            raise ProblemError(
                f"repository {self.repository.name}: pytest collected no test below "
                f"{self.repository.test_paths}; {answer['errors'][:2]}"
            )
        self.tests, self.collection_errors = tuple(answer["tests"]), tuple(answer["errors"])
        codes = {path: bytes.fromhex(code) for path, code in answer["codes"].items()}
        collected = CollectionCache(answer["modules"], codes, answer["test_places"])
        self._fresh.collected = self._visible.collected = collected

    async def run(
        self,
        files: Mapping[str, bytes | None],
        test_ids: Sequence[str],
        time_limit_seconds: float = 10.0,
    ) -> TestReport:
        """Runs tests on the pristine repository with `files` written over it (None: removed).

        `time_limit_seconds` is wall time of the whole run. CPU time is limited per test; a run with a test over that
        limit is repeated with three times as much. Raises SandboxLost only when the box died twice.
        """
        changed = self.repository.keep_editable(files)
        key = (self.repository.fingerprint, fingerprint_files(changed), tuple(test_ids))
        return await self._share(
            key, functools.partial(self._judge, changed, test_ids, time_limit_seconds)
        )

    async def _share(
        self, key: ReportKey, ask: Callable[[], Awaitable[dict[str, Any]]]
    ) -> TestReport:
        """The report of a key, from the cache, from a run in progress or from a new run."""
        cached = self.cache.get(key)
        if cached is not None:
            return cached
        running = self._running.get(key)
        if running is None:
            # Attempts with the same edit share one task, so a cancelled attempt must not cancel it.
            running = asyncio.create_task(self._ask(key, ask))
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(running)

    async def _ask(
        self, key: ReportKey, ask: Callable[[], Awaitable[dict[str, Any]]]
    ) -> TestReport:
        reply = await ask()
        report = _read_report(reply)
        if reply["finished"]:
            self.cache.put(key, report)
        return report

    async def run_visible(
        self,
        files: Mapping[str, bytes | None],
        others: Mapping[str, bytes],
        test_ids: Sequence[str],
        time_limit_seconds: float = 10.0,
    ) -> TestReport:
        """Like `run`, in a box that holds only the product code with `files` over it and `others`: the tests
        and further files that an agent sees. The output of the run may therefore be shown to the agent.
        """
        is_editable = self.repository.is_editable
        visible = {path: text for path, text in self.repository.files.items() if is_editable(path)}
        visible |= {path: text for path, text in others.items() if not is_editable(path)}
        changed = self.repository.keep_editable(files)
        seen = _apply_changes(visible, changed)
        if seen == _apply_changes(self.repository.files, changed):  # the agent sees every file
            return await self.run(changed, test_ids, time_limit_seconds)
        key = ("visible", fingerprint_files(seen), tuple(test_ids))

        async def look() -> dict[str, Any]:
            await self.start()
            reply = await self._visible.run(seen, test_ids, time_limit_seconds)
            # A test inherited from a hidden class is missing here, and is left out of the report.
            outcomes = reply["outcomes"].items()
            found = {test: outcome for test, outcome in outcomes if outcome != "missing"}
            return {**reply, "outcomes": found} if reply["finished"] and found else reply

        return await self._share(key, look)

    async def run_again(
        self,
        files: Mapping[str, bytes | None],
        test_ids: Sequence[str],
        time_limit_seconds: float = 10.0,
    ) -> TestReport:
        """Like `run`, without the cache."""
        changed = self.repository.keep_editable(files)
        return _read_report(await self._judge(changed, test_ids, time_limit_seconds))

    async def _judge(
        self,
        changed: Mapping[str, bytes | None],
        test_ids: Sequence[str],
        time_limit_seconds: float,
        **mode: bool,
    ) -> dict[str, Any]:
        """The reply to a run on the pristine repository with `changed` over it."""
        await self.start()
        whole = _apply_changes(self.repository.files, changed)
        reply = await self._fresh.run(whole, test_ids, time_limit_seconds, **mode)
        if reply["finished"] and "timeout" in reply["outcomes"].values():
            # On a busy machine, hyperthreads that share a core count up to twice the CPU time.
            seconds = _RETRY_CPU_FACTOR * self._limits.test_cpu_seconds
            reply = await self._fresh.run(
                whole, test_ids, time_limit_seconds, test_cpu_seconds=seconds, **mode
            )
        return reply

    async def probe(
        self, test_ids: Sequence[str], time_limit_seconds: float = 120.0, *, profile: bool = True
    ) -> dict[str, TestProbe]:
        """Duration of each pristine test and, with `profile`, the functions it called."""
        mode = {"profile": True} if profile else {"timed": True}
        reply = await self._judge({}, test_ids, time_limit_seconds, **mode)
        prefix = REPOSITORY_PATH + "/"
        return {
            test: TestProbe(
                outcome=TestOutcome(reply["outcomes"][test]),
                seconds=detail["seconds"],
                idle_seconds=detail["idle_seconds"],
                num_calls=detail["num_calls"],
                called=frozenset(
                    (path.removeprefix(prefix), line, name) for path, line, name in detail["called"]
                ),
            )
            for test, detail in reply["details"].items()
        }

    async def close(self) -> None:
        """Ends the boxes."""
        if self._collecting is not None:
            self._collecting.cancel()
        await self._fresh.close()
        await self._visible.close()


def _apply_changes(
    files: Mapping[str, bytes], changed: Mapping[str, bytes | None]
) -> dict[str, bytes]:
    merged = {**files, **changed}
    return {path: content for path, content in merged.items() if content is not None}


def as_text(text: str) -> str:
    """Text from code under test, with lone surrogates escaped."""
    return text.encode(errors="backslashreplace").decode()


def _read_report(reply: dict[str, Any]) -> TestReport:
    try:
        failure = reply["failure"]
        if failure is not None:
            frames = [Frame(path=path, line_number=line) for path, line in failure["frames"]]
            texts = {name: as_text(failure[name]) for name in ("error_type", "message")}
            failure = TestFailure(**{**failure, **texts, "frames": tuple(frames)})
        return TestReport(
            outcomes=reply["outcomes"],
            first_failure=failure,
            tampering=as_text(", ".join(reply["violations"])),
            route=reply["route"],
            seconds=reply["seconds"],
            cpu_seconds=reply["cpu_seconds"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SandboxError(
            f"the reply to a test run is not a valid report: {error!r:.200}"
        ) from error
