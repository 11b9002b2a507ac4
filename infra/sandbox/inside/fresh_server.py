"""Process 1 of a box for test runs. It has imported pytest and no repository; each run is a fork that imports its own.

The files of a run go from the host's socket into a pipe of the child without being read here, so that the memory from
which the next run is forked holds nothing of this one. Work that all children share is done before the fork: the start
of pytest, up to the point where a conftest.py can take part, and imports of the standard library modules that the host
names. Runs inside the box.
"""

import contextlib
import importlib
import json
import marshal
import os
import re
import socket
import struct
import sys
import types
from collections.abc import Generator, Iterator
from pathlib import Path, PurePath

import pytest

from ostinato.infra.sandbox.inside.apart import protect_server
from ostinato.infra.sandbox.inside.children import Runs
from ostinato.infra.sandbox.inside.integrity import (
    RunnerState,
    TestCodes,
    find_codes,
    place_tests,
    take_snapshot,
)
from ostinato.infra.sandbox.inside.sources import MemoryFinder, argument_of, read_options
from ostinato.infra.sandbox.inside.test_runner import (
    CANARIES,
    CANARY,
    OutcomeRecorder,
    Sender,
    Shared,
    freeze_memory,
    report_import_failure,
    run_child,
    split_canaries,
)
from ostinato.infra.sandbox.inside.wire import encode_frame

ROOT = "/repo"
_PREFIX = struct.Struct(">II")
_PYTEST_ARGUMENTS = [
    f"--rootdir={ROOT}",
    f"--confcutdir={ROOT}",
    "--capture=no",
    "--assert=plain",
    "--import-mode=prepend",
    *("-c", os.path.join(os.path.dirname(__file__), "pytest.ini")),
    *("-W", "ignore"),
    *("-p", "no:cacheprovider", "-p", "no:junitxml", "-p", "no:pastebin"),
    "--keep-duplicates",  # for a file of an unusual name below a requested folder
    "--doctest-glob=none",  # text files are no tests; the plugin stays for its fixtures
    *("-p", "no:stepwise", "-p", "no:faulthandler", "-p", "no:logging"),
    CANARY,
]


class FreshServer:
    """Server that forks a child per request and never reads the files that the request brings."""

    def __init__(self, control: socket.socket, allowed: bytes) -> None:
        self._control = control
        self._opening, _ = self._read_header()
        self.limits = self._opening["limits"]
        self.has_conftest = self._opening["has_conftest"]
        written = ROOT if self._opening["tests_may_write"] else ""
        self._runs = Runs(control.fileno(), allowed, self.limits, written)
        self._tried: set[str] = set()

    def serve(self) -> "RunRequest":
        """Answers the host until it closes the socket. Returns only in a child, with the request of its run."""
        freeze_memory()
        self._send({"id": self._opening["id"]})
        while True:
            request, sizes = self._read_header()
            self._import_modules(request["modules"])
            source, sink = os.pipe()
            run = self._runs.start(request)
            if isinstance(run, Sender):
                os.close(sink)
                return RunRequest(request, sizes, source, run)
            os.close(source)
            self._forward(sum(sizes), sink)
            self._send(self._runs.finish(run))

    def _import_modules(self, names: list[str]) -> None:
        """Imports modules of the standard library, which every later child then has."""
        fresh = [name for name in names if name not in self._tried]
        for name in fresh:
            self._tried.add(name)
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if fresh:
            freeze_memory()

    def _read_header(self) -> tuple[dict, list[int]]:
        """Header of the next frame and the sizes of its blobs. Ends the process when the socket is closed."""
        text_bytes, _ = _PREFIX.unpack(self._read(_PREFIX.size))
        content = json.loads(self._read(text_bytes))
        return content["header"], content["blob_bytes"]

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self._control.recv(num_bytes - len(data))
            if not piece:
                os._exit(0)
            data += piece
        return data

    def _forward(self, num_bytes: int, sink: int) -> None:
        """Moves bytes from the socket to a pipe inside the kernel, and closes the pipe. Drops them if the child is dead."""
        source = nowhere = -1
        while num_bytes:
            try:
                moved = os.splice(self._control.fileno(), sink, num_bytes)
            except BrokenPipeError:
                os.close(sink)
                source, sink = os.pipe()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                continue
            if not moved:
                os._exit(0)
            num_bytes -= moved
            while nowhere >= 0 and moved:
                moved -= os.splice(source, nowhere, moved)
        for descriptor in {sink, source, nowhere} - {-1}:
            os.close(descriptor)

    def _send(self, header: dict) -> None:
        self._control.sendall(encode_frame(header))


class RunRequest:
    """A request in its child, with the finder of its files and the sender of its answers."""

    def __init__(self, request: dict, sizes: list[int], source: int, send: Sender) -> None:
        """Reads the files from the pipe `source` and makes them importable."""
        self.request = request
        self.send = send
        with open(source, "rb") as pipe:
            blobs = [pipe.read(size) for size in sizes]
        files = dict(zip(request["paths"], blobs, strict=False))
        codes = dict(zip(request["compiled"], blobs[len(files) :], strict=True))
        self.finder = MemoryFinder(ROOT, files, codes)
        self.test_codes = TestCodes(ROOT, self._pristine_codes(codes))
        self.modules = frozenset(sys.modules)
        self._wanted = frozenset(place for test in request["tests"] for place in _places_of(test))
        self._files = self._existing()
        self._paths = frozenset(
            folder
            for place in self._files
            for folder in (place, *map(str, PurePath(place).parents))
        )
        sys.meta_path.insert(0, self.finder)
        sys.path.insert(0, ROOT)

    def _pristine_codes(self, codes: dict[str, bytes]) -> dict[str, types.CodeType]:
        """Code of the requested tests, loaded before any code of the repository runs."""
        found: dict[str, dict[tuple[str, int], types.CodeType]] = {}
        pristine: dict[str, types.CodeType] = {}
        for test, (name, line) in self.request["test_places"].items():
            path = test.partition("::")[0]
            if path in codes:
                if path not in found:
                    found[path] = find_codes(marshal.loads(codes[path]))
                if (name, line) in found[path]:
                    pristine[test] = found[path][name, line]
        return pristine

    @property
    def _is_search(self) -> bool:
        """Whether the request is to collect tests."""
        return "collect" in self.request

    def wants(self, node_id: str) -> bool:
        """Whether a node id names a requested test or may contain one."""
        return self._is_search or node_id in self._wanted

    def leads_to_test(self, path: str) -> bool:
        """Whether a path of the repository is a file to collect, or a folder above one."""
        is_below = self._is_search and not self._files.isdisjoint(map(str, PurePath(path).parents))
        return is_below or path in self._paths or not path.startswith(ROOT + "/")

    def places(self) -> list[str]:
        """Arguments of pytest that hold the existing files or folders to collect."""
        return sorted({*map(argument_of, self._files)})

    def _existing(self) -> frozenset[str]:
        tests = (test.partition("::")[0] for test in self.request["tests"])
        wanted = self.request.get("collect") or tests
        places = {os.path.normpath(os.path.join(ROOT, path)) for path in wanted}
        return frozenset(filter(os.path.exists, places))


class FreshRun:
    """A pytest plugin that serves the host in the parent, and controls one requested run in each child."""

    def __init__(self, server: FreshServer) -> None:
        self._server = server
        self.asked: RunRequest | None = None
        self.failures: list[str] = []
        self._snapshot: RunnerState | None = None
        self._recorder = OutcomeRecorder(ROOT)
        self._canaries: list[pytest.Item] = []
        self._error: BaseException | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(
        self, early_config: pytest.Config, args: list[str]
    ) -> Generator[None, None, None]:
        """Serves from here on if a conftest.py may take part in pytest's start. Notes why a conftest.py failed."""
        if self._server.has_conftest:
            self._watch(early_config)
            self.asked = self._server.serve()
            places = self.asked.places()
            args += places
            early_config.known_args_namespace.file_or_dir += places
        try:
            return (yield)
        except BaseException as error:
            self._error = error.__cause__ or error
            self.failures.append(f"{type(self._error).__name__}: {self._error}"[-400:])
            raise

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Serves from here on, unless it did before. The child then collects the requested tests."""
        if self.asked is None:
            session.perform_collect([CANARY])
            self._canaries = split_canaries(session)[0]
            self._watch(session.config)
            self.asked = self._server.serve()
            session.config.args = self.asked.places()

    def _watch(self, config: pytest.Config) -> None:
        """Takes the snapshot before any code of the repository runs."""
        config.pluginmanager.register(self._recorder, "ostinato-recorder")
        self._snapshot = take_snapshot(config.pluginmanager)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """True for a file or folder that leads to no requested test."""
        if self.asked is None or self.asked.leads_to_test(str(collection_path)):
            return None
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Module | pytest.Class, name: str
    ) -> list[pytest.Item] | None:
        """No items for a class or function without a requested test. Its file was imported, and collecting it would
        take longer than running the requested tests.
        """
        is_left_out = (
            self.asked is not None
            and str(collector.path) != CANARY
            and not self.asked.wants(f"{collector.nodeid}::{name}")
        )
        return [] if is_left_out else None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes files that could not be imported."""
        if report.failed:
            self.failures.append(f"{report.nodeid}: {str(report.longrepr)[-400:]}")

    def pytest_exception_interact(self, call: pytest.CallInfo, report: object) -> None:
        """Notes the first exception of an import of a test file."""
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            error = call.excinfo.value
            self._error = self._error or error.__cause__ or error

    def pytest_internalerror(self, excrepr: object, excinfo: pytest.ExceptionInfo) -> None:
        """Notes the exception that ended pytest."""
        self._error = self._error or excinfo.value
        self.failures.append(str(excrepr)[-1500:])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the requested tests or reports the collected ones, and ends the process."""
        assert self._snapshot is not None
        assert self.asked is not None
        self._snapshot.renew_hooks()
        canaries, items = split_canaries(session)
        if "collect" in self.asked.request:
            self._send_collected(items)
            os._exit(0)
        if self._error is None:
            self._recorder.test_codes = self.asked.test_codes
            self._recorder.test_codes.add(items)
            shared = Shared(
                items=items,
                canaries=canaries or self._canaries,
                snapshot=self._snapshot,
                recorder=self._recorder,
                limits=self._server.limits,
            )
            run_child(shared, self.asked.request, self.asked.send)
            os._exit(0)
        return True

    def end(self) -> None:
        """Reports that no test could run, and why."""
        assert self.asked is not None
        if "collect" in self.asked.request:
            self._send_collected({})
            return
        error = self._error or ImportError("pytest found none of the tests")
        tests = self.asked.request["tests"]
        report_import_failure(self.asked.send, tests, error, self._recorder)
        self._send_end({})

    def _send_collected(self, tests: dict[str, pytest.Item]) -> None:
        """Reports the tests, the files that cannot be imported, and results that later runs reuse."""
        assert self.asked is not None
        new = [name for name in sys.modules if name not in self.asked.modules]
        modules = [name for name in new if _is_standard(name)]
        codes = {path: marshal.dumps(code).hex() for path, code in self.asked.finder.codes.items()}
        collected = {
            "tests": list(tests), "errors": self.failures, "modules": modules, "codes": codes,
            "test_places": place_tests(ROOT, tests),
        }  # fmt: skip
        self._send_end({"collected": collected})

    def _send_end(self, fields: dict) -> None:
        done = {"violations": [], "seconds": 0.0, "cpu_seconds": 0.0}
        assert self.asked is not None
        self.asked.send({"done": True, "route": "fresh", **done, **fields})


def _places_of(test: str) -> Iterator[str]:
    """Node ids of a test and of everything that may contain it. Text in its parameters may add ids that do not exist."""
    yield test
    for end in re.finditer(r"::|\[", test):
        yield test[: end.start()]


def _is_standard(name: str) -> bool:
    place = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
    return place.startswith(sys.prefix + "/") or place in ("built-in", "frozen")


def main(descriptor: int, filter_descriptor: int) -> None:
    """Serves the host on a socket."""
    protect_server()
    with open(filter_descriptor, "rb") as file:
        allowed = file.read()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    run = FreshRun(FreshServer(control, allowed))
    code: object = None
    try:
        code = pytest.main([*_PYTEST_ARGUMENTS, *read_options(ROOT, CANARIES)], plugins=[run])
    finally:
        if run.asked is not None:
            try:
                run.end()
            finally:
                os._exit(0)
    raise SystemExit(f"pytest ended with {code!r} before serving: {' | '.join(run.failures[:3])}")
