"""Runs a repository's own tests on changed files in tens of milliseconds.

`TestServer`: boxes in which each run is a process that imports the changed repository afresh; and the cache of reports
by content. Only product code counts: changes of tests, of runner configuration and of anything but Python files are
left out. It gives outcomes, not rewards.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ostinato.infra.platform.errors import ProblemError, SandboxError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.fresh_runs import FreshRuns, Learnt
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
    idle_seconds: float  # of these, how long it slept or waited for others
    # of Python and built-in functions, the runner's own included; 0 when not profiled
    num_calls: int
    # (path, first line, qualified name) of functions of the repository
    called: frozenset[tuple[str, int, str]]


_LONGER = 3.0  # than the CPU time that one test has at first


class VerdictCache:
    """Least recently used reports by repository, changed files and tests. In memory."""

    def __init__(self, capacity: int = 20_000) -> None:
        self._capacity = capacity
        self._reports: OrderedDict[ReportKey, TestReport] = OrderedDict()

    def get(self, key: ReportKey) -> TestReport | None:
        """A report made before for the same content."""
        if key in self._reports:
            self._reports.move_to_end(key)
        return self._reports.get(key)

    def put(self, key: ReportKey, report: TestReport) -> None:
        """Keep a report. The least recently used one goes when there are too many."""
        self._reports[key] = report
        if len(self._reports) > self._capacity:
            self._reports.popitem(last=False)


class TestServer:
    """Verdict boxes of one repository. Belongs to one event loop."""

    __test__ = False

    def __init__(
        self,
        repository: PreparedRepository,
        limits: SandboxLimits | None = None,
        *,
        parallel_runs: int = 2,
        cache: VerdictCache | None = None,
        hash_seed: int = 0,
    ) -> None:
        self.repository = repository
        self.tests: tuple[str, ...] = ()
        self.collection_errors: tuple[str, ...] = ()
        self.cache = cache or VerdictCache()
        self._limits = limits or SandboxLimits(memory_bytes=2 << 30)

        def boxes(*, hides_tests: bool) -> FreshRuns:
            given = {"hides_tests": hides_tests, "hash_seed": hash_seed}
            return FreshRuns(repository, self._limits, parallel_runs, **given)

        # its runs bring all tests anyway, and a test may read a file that looks like one
        self._fresh = boxes(hides_tests=False)
        # boxes of their own: their disk holds no test that an agent must not see
        self._visible = boxes(hides_tests=True)
        self._running: dict[ReportKey, asyncio.Task[TestReport]] = {}
        self._collecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Collects the tests of the pristine repository. The first run does it where nobody did."""
        if self._collecting is None or self._has_failed(self._collecting):
            self._collecting = asyncio.create_task(self._collect())
        await asyncio.shield(self._collecting)

    @staticmethod
    def _has_failed(task: asyncio.Task[None]) -> bool:
        return task.done() and (task.cancelled() or task.exception() is not None)

    async def _collect(self) -> None:
        files, paths = self.repository.files, list(self.repository.test_paths)
        reply = await self._fresh.run(files, (), self._limits.start_seconds, collect=paths)
        said = reply["collected"] or {"tests": [], "errors": [f"the run ended: {reply['route']}"]}
        if not said["tests"]:
            raise ProblemError(
                f"repository {self.repository.name}: pytest collected no test below "
                f"{self.repository.test_paths}; {said['errors'][:2]}"
            )
        self.tests, self.collection_errors = tuple(said["tests"]), tuple(said["errors"])
        codes = {path: bytes.fromhex(code) for path, code in said["codes"].items()}
        learnt = Learnt(said["modules"], codes, said["test_places"])
        self._fresh.learnt = self._visible.learnt = learnt

    async def run(
        self,
        files: Mapping[str, bytes | None],
        test_ids: Sequence[str],
        time_limit_seconds: float = 10.0,
    ) -> TestReport:
        """Run tests on the pristine repository with `files` laid over it (None: removed).

        `time_limit_seconds` is wall time of the run; CPU time is limited per test, and a run with a test beyond it
        is done again with three times as much. SandboxLost only when the box died twice.
        """
        changed = self.repository.keep_editable(files)
        key = (self.repository.fingerprint, fingerprint_files(changed), tuple(test_ids))

        async def judge() -> dict[str, Any]:
            return await self._judge(changed, test_ids, time_limit_seconds)

        return await self._share(key, judge)

    async def _share(
        self, key: ReportKey, ask: Callable[[], Awaitable[dict[str, Any]]]
    ) -> TestReport:
        """The report under a key, asked for once."""
        cached = self.cache.get(key)
        if cached is not None:
            return cached
        running = self._running.get(key)
        if running is None:
            # A task of its own: attempts that make the same edit share it, and one that is cancelled
            # does not take it from the others.
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
        """As `run`, in a box that holds only product code with `files` laid over it, and `others`: tests
        and other files as an agent sees them. What the run prints is no secret.
        """
        is_editable = self.repository.is_editable
        kept = {path: text for path, text in self.repository.files.items() if is_editable(path)}
        kept |= {path: text for path, text in others.items() if not is_editable(path)}
        changed = self.repository.keep_editable(files)
        seen = _lay_over(kept, changed)
        if seen == _lay_over(self.repository.files, changed):  # nothing is hidden from this agent
            return await self.run(changed, test_ids, time_limit_seconds)
        key = ("visible", fingerprint_files(seen), tuple(test_ids))

        async def look() -> dict[str, Any]:
            await self.start()
            reply = await self._visible.run(seen, test_ids, time_limit_seconds)
            # a test inherited from a hidden one is hidden with it
            found = {test: said for test, said in reply["outcomes"].items() if said != "missing"}
            return {**reply, "outcomes": found} if reply["finished"] and found else reply

        return await self._share(key, look)

    async def run_again(
        self,
        files: Mapping[str, bytes | None],
        test_ids: Sequence[str],
        time_limit_seconds: float = 10.0,
    ) -> TestReport:
        """As `run` without the cache."""
        changed = self.repository.keep_editable(files)
        return _read_report(await self._judge(changed, test_ids, time_limit_seconds))

    async def _judge(
        self,
        changed: Mapping[str, bytes | None],
        test_ids: Sequence[str],
        time_limit_seconds: float,
        **mode: bool,
    ) -> dict[str, Any]:
        """Reply to a run on `changed` over the pristine repository."""
        await self.start()
        whole = _lay_over(self.repository.files, changed)
        reply = await self._fresh.run(whole, test_ids, time_limit_seconds, **mode)
        if reply["finished"] and "timeout" in reply["outcomes"].values():
            # cores that share their units count up to twice the CPU time on a busy machine
            seconds = _LONGER * self._limits.test_cpu_seconds
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
        """End the boxes."""
        if self._collecting is not None:
            self._collecting.cancel()
        await self._fresh.close()
        await self._visible.close()


def _lay_over(files: Mapping[str, bytes], changed: Mapping[str, bytes | None]) -> dict[str, bytes]:
    merged = {**files, **changed}
    return {path: content for path, content in merged.items() if content is not None}


def as_text(said: str) -> str:
    """Text from code under test, with lone surrogates escaped."""
    return said.encode(errors="backslashreplace").decode()


def _read_report(reply: dict[str, Any]) -> TestReport:
    try:
        failure = reply["failure"]
        if failure is not None:
            frames = [Frame(path=path, line_number=line) for path, line in failure["frames"]]
            said = {name: as_text(failure[name]) for name in ("error_type", "message")}
            failure = TestFailure(**{**failure, **said, "frames": tuple(frames)})
        return TestReport(
            outcomes=reply["outcomes"],
            first_failure=failure,
            tampering=as_text(", ".join(reply["violations"])),
            route=reply["route"],
            seconds=reply["seconds"],
            cpu_seconds=reply["cpu_seconds"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SandboxError(f"a test run answered with no report: {error!r:.200}") from error
