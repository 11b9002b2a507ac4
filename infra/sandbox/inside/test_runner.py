"""Runs requested tests in a forked child and reports each result to the parent through a pipe.

It covers the child's work after the imports: limits, the tests with the canaries, and the integrity check. Runs inside
the box; the parent is fresh_server.py.
"""

import gc
import os
import random
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from _pytest.runner import runtestprotocol

from ostinato.infra.sandbox.inside import integrity
from ostinato.infra.sandbox.inside.cpu_waits import read_waited_seconds
from ostinato.infra.sandbox.inside.wire import encode_frame

CANARY = os.path.join(os.path.dirname(__file__), "canary.py")
CANARIES = "test_must_*"  # names of its functions
_MESSAGE_CHARACTERS = 400
_MAX_FRAMES = 40


class TestTimeout(BaseException):
    """A test used more CPU time than it may. Not an Exception, so that tested code does not catch it by accident."""

    __test__ = False


@dataclass(eq=False)  # pluggy keeps plugins in sets
class OutcomeRecorder:
    """Collects the outcome of the running test through pytest's hooks."""

    root: str
    outcome: str = "missing"
    failure: dict | None = None
    test_codes: integrity.TestCodes | None = None
    replaced_tests: list[str] = field(default_factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Notes a test whose code was replaced, right before it runs."""
        self._compare_code(item)

    @pytest.hookimpl
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> pytest.TestReport:
        """A report without the text of the traceback, which is costly. Notes the frames instead."""
        outcome = "passed"
        if call.when == "call":  # a thread may have replaced the code since the last check
            self._compare_code(item)
        if call.excinfo is not None:
            is_skip = isinstance(call.excinfo.value, pytest.skip.Exception)
            outcome = "skipped" if is_skip else "failed"
            self._note(call.when, outcome, call.excinfo)
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome=outcome,
            longrepr=None,
            when=call.when,  # pyright: ignore[reportArgumentType] - never "collect" here
            duration=call.duration,
        )

    def begin(self) -> None:
        """Starts a new test."""
        self.outcome, self.failure = "passed", None

    def finish(self, reports: list[pytest.TestReport]) -> None:
        """Derives the outcome of the test from the reports of its phases."""
        ran = any(report.when == "call" for report in reports)
        if self.outcome == "passed" and any(report.failed for report in reports):
            self.outcome = "failed"  # a strict expected failure that passed
        if self.outcome == "passed" and (
            not ran or any(_is_not_a_pass(report) for report in reports)
        ):
            self.outcome = "skipped"

    def _compare_code(self, item: pytest.Item) -> None:
        if self.test_codes is not None and not self.test_codes.holds(item):
            self.replaced_tests.append(f"replaced test {item.nodeid}")

    def _note(self, when: str, outcome: str, excinfo: pytest.ExceptionInfo) -> None:
        if self.outcome not in ("passed", "skipped"):
            return
        if isinstance(excinfo.value, TestTimeout):
            outcome = "timeout"
        elif outcome == "failed" and when != "call":
            outcome = "error"
        self.outcome = outcome
        if outcome == "skipped":
            return
        self.failure = {
            "error_type": type(excinfo.value).__name__,
            "message": _text_of(excinfo.value),
            "frames": self.frames_of(excinfo.value, excinfo.tb),
        }

    def frames_of(
        self, error: BaseException, traceback: types.TracebackType | None
    ) -> list[tuple[str, int]]:
        """Frames inside the repository, outermost first. A syntax error adds its own place."""
        frames = self._frames(traceback)
        if isinstance(error, SyntaxError) and (error.filename or "").startswith(self.root + "/"):
            frames.append((str(error.filename)[len(self.root) + 1 :], error.lineno or 1))
        return frames

    def _frames(self, traceback: types.TracebackType | None) -> list[tuple[str, int]]:
        frames: list[tuple[str, int]] = []
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if code.co_filename.startswith(self.root + "/"):
                # Instructions that the compiler adds have no line, and a signal can arrive in them.
                line = traceback.tb_lineno or code.co_firstlineno
                frames.append((code.co_filename[len(self.root) + 1 :], line))
            traceback = traceback.tb_next
        return frames[-_MAX_FRAMES:]


@dataclass
class Shared:
    """Tests, canaries, runner snapshot, recorder and limits of one run."""

    items: dict[str, pytest.Item]
    canaries: list[pytest.Item]
    snapshot: integrity.RunnerState
    recorder: OutcomeRecorder
    limits: dict


def split_canaries(session: pytest.Session) -> tuple[list[pytest.Item], dict[str, pytest.Item]]:
    """The collected canaries, and the other collected tests by id. Fixtures that the repository's settings give to every
    test are taken from the canaries, which could not find them.
    """
    canaries = [item for item in session.items if str(item.path) == CANARY]
    for item in canaries:
        if isinstance(item, pytest.Function):
            item.fixturenames.clear()
    return canaries, {item.nodeid: item for item in session.items if str(item.path) != CANARY}


class Sender:
    """Writes frames to the parent, each with the secret key of this run."""

    def __init__(self, pipe: int, key: str) -> None:
        self._pipe = pipe
        self._key = key

    def __call__(self, message: dict) -> None:
        data = memoryview(encode_frame({**message, "key": self._key}))
        while data:
            data = data[os.write(self._pipe, data) :]


def run_child(shared: Shared, request: dict, send: Sender) -> None:
    """Runs the child's tests, canaries and checks after the imports, and reports all results."""
    started = time.perf_counter()
    _limit_memory(shared.limits)
    recorder = shared.recorder
    items = [shared.items[test] for test in request["tests"] if test in shared.items]
    profile = request.get("profile", False)
    violations = integrity.find_changes(shared.snapshot)  # done while the change was imported
    seconds = request.get("test_cpu_seconds", shared.limits["test_cpu_seconds"])
    loop = _TestLoop(recorder, send, seconds, profile)
    has_ended = True
    for item, following in zip(items, [*items[1:], None], strict=False):
        if not loop.run(item, following):
            has_ended = False
            break
        violations += integrity.find_changes(shared.snapshot) if len(violations) < 20 else []
    violations += recorder.replaced_tests
    if has_ended and not profile:  # after a timeout pytest cannot start another test
        violations += _run_canaries(shared.canaries, recorder)
    violations += integrity.find_changes(shared.snapshot)
    send(
        {
            "done": True,
            "route": "fresh",
            "violations": list(dict.fromkeys(violations))[:20],
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time(),
        }
    )


def report_import_failure(
    send: Sender, tests: list[str], error: BaseException, recorder: OutcomeRecorder
) -> None:
    """Reports that each test ended in the same error before it began."""
    failure = {
        "error_type": type(error).__name__,
        "message": _text_of(error),
        "frames": recorder.frames_of(error, error.__traceback__),
    }
    for position, test in enumerate(tests):
        send(
            {
                "test": test,
                "outcome": "error",
                "failure": failure if position == 0 else None,
                "seconds": 0.0,
            }
        )


class _TestLoop:
    """Runs tests one after another, each with a CPU limit, enforced by an exception and later by the kernel."""

    def __init__(
        self, recorder: OutcomeRecorder, send: Sender, cpu_seconds: float, profile: bool
    ) -> None:
        self._recorder = recorder
        self._send = send
        self._seconds = cpu_seconds
        self._profile = profile
        signal.signal(signal.SIGPROF, self._expire)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)

    def run(self, item: pytest.Item, following: pytest.Item | None) -> bool:
        """Runs a test and reports it. False: the remaining tests must not run."""
        recorder = self._recorder
        self._send({"begin": item.nodeid})
        random.seed(0)  # a verdict must not depend on chance
        calls: dict[types.CodeType, int] = {}
        recorder.begin()
        watch = _Stopwatch()
        self._arm()
        try:
            if self._profile:
                sys.setprofile(_make_profiler(calls))
            reports = runtestprotocol(item, log=False, nextitem=following)
        except TestTimeout:
            recorder.outcome, reports = "timeout", []
        finally:
            sys.setprofile(None)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        if recorder.outcome != "timeout":
            recorder.finish(reports)
        message = {
            "test": item.nodeid,
            "outcome": recorder.outcome,
            "failure": recorder.failure,
            **watch.read(),
        }
        if self._profile:
            root = recorder.root + "/"
            message["num_calls"] = sum(calls.values())
            message["called"] = [
                (code.co_filename, code.co_firstlineno, code.co_qualname)
                for code in calls
                if code.co_filename.startswith(root)
            ]
        self._send(message)
        return recorder.outcome != "timeout"

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds, 0.25)
        soft = int(time.process_time() + self._seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))

    def _expire(self, number: int, frame: types.FrameType | None) -> None:
        raise TestTimeout(f"used more than {self._seconds} s of CPU time")


def _make_profiler(
    calls: dict[types.CodeType, int],
) -> Callable[[types.FrameType, str, object], None]:
    """A profile hook that counts calls by code object. A call of a built-in counts for its caller."""

    def profile(frame: types.FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code] = calls.get(frame.f_code, 0) + 1

    return profile


class _Stopwatch:
    """Wall time since its creation, and the part in which this process neither used nor awaited a CPU."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._busy = self._read_busy()

    def read(self) -> dict[str, float]:
        """Both times in seconds."""
        wall = time.perf_counter() - self._wall
        return {"seconds": wall, "idle_seconds": max(0.0, wall - self._read_busy() + self._busy)}

    def _read_busy(self) -> float:
        return time.process_time() + read_waited_seconds()


def _run_canaries(canaries: list[pytest.Item], recorder: OutcomeRecorder) -> list[str]:
    """Descriptions of canaries that failed but must pass, or passed but must fail. A canary that lacked time or
    memory to run proves nothing and is not listed.
    """
    fooled: list[str] = []
    for item, following in zip(canaries, [*canaries[1:], None], strict=True):
        recorder.begin()
        recorder.finish(runtestprotocol(item, log=False, nextitem=following))
        unwanted = "failed" if item.name == "test_must_pass" else "passed"
        has_memory = (recorder.failure or {}).get("error_type") != MemoryError.__name__
        if recorder.outcome == unwanted and has_memory:
            fooled.append(f"canary {item.name} {recorder.outcome}")
    return fooled


def _is_not_a_pass(report: pytest.TestReport) -> bool:
    """Whether a test was skipped or expected to fail (pytest marks the report of the latter)."""
    return report.skipped or "wasxfail" in vars(report)


def _limit_memory(limits: dict) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = used + limits["test_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - code under test may raise anything
        text = f"<its text fails: {type(failure).__name__}>"
    return text[:_MESSAGE_CHARACTERS]


def freeze_memory() -> None:
    """Excludes the parent's objects from garbage collection, so that forks share its pages."""
    gc.collect()
    gc.freeze()
