"""Process 1 of a box for test runs: it has imported pytest and no repository, and each run is a fork that
imports its own.

A run's files go from the host's socket into a pipe of the child without being read here, so that
nothing of one run is in the memory that the next is forked from. What a child need not do again is
done before: pytest's own start, as far as no conftest.py takes part in it, and modules of the standard
library that the host names. Runs inside the box.
"""

import contextlib
import importlib
import json
import marshal
import os
import socket
import struct
import sys
import types
from collections.abc import Generator

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
from ostinato.infra.sandbox.inside.sources import MemoryFinder, read_options
from ostinato.infra.sandbox.inside.test_runner import (
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
    "--keep-duplicates",  # a file of an unusual name below a folder that is named too
    "--doctest-glob=none",  # no text file is a test; the plugin stays for its fixtures
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
        self._runs = Runs(control.fileno(), allowed, self.limits)
        self._tried: set[str] = set()

    def serve(self) -> "Asked":
        """Answer the host until it closes the socket. Only a child returns, with what is asked of it."""
        freeze_memory()
        self._send({"id": self._opening["id"]})
        while True:
            request, sizes = self._read_header()
            self._import_modules(request["modules"])
            source, sink = os.pipe()
            run = self._runs.start(request)
            if isinstance(run, Sender):
                os.close(sink)
                return Asked(request, sizes, source, run)
            os.close(source)
            self._forward(sum(sizes), sink)
            self._send(self._runs.finish(run))

    def _import_modules(self, names: list[str]) -> None:
        """Modules of the standard library, which then are there in every later child."""
        fresh = [name for name in names if name not in self._tried]
        for name in fresh:
            self._tried.add(name)
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if fresh:
            freeze_memory()

    def _read_header(self) -> tuple[dict, list[int]]:
        """Header of the next frame and the sizes of its blobs. Ends the process with the socket."""
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
        """Moves bytes from socket to pipe inside the kernel, and closes the pipe. A dead child's are dropped."""
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


class Asked:
    """A request, the finder of its files, and the way to answer it."""

    def __init__(self, request: dict, sizes: list[int], source: int, send: Sender) -> None:
        """Reads the files from the pipe `source`. From here on they can be imported."""
        self.request = request
        self.send = send
        with open(source, "rb") as pipe:
            blobs = [pipe.read(size) for size in sizes]
        files = dict(zip(request["paths"], blobs, strict=False))
        codes = dict(zip(request["compiled"], blobs[len(files) :], strict=True))
        self.finder = MemoryFinder(ROOT, files, codes)
        self.test_codes = TestCodes(ROOT, self._pristine_codes(codes))
        self.modules = frozenset(sys.modules)
        sys.meta_path.insert(0, self.finder)
        sys.path.insert(0, ROOT)

    def _pristine_codes(self, codes: dict[str, bytes]) -> dict[str, types.CodeType]:
        """Code of the requested tests, read before any code of the repository runs."""
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

    def places(self) -> list[str]:
        """The files of tests to collect."""
        tests = (test.partition("::")[0] for test in self.request["tests"])
        wanted = self.request.get("collect") or tests
        places = {os.path.join(ROOT, path) for path in wanted}
        return sorted(filter(os.path.exists, places))


class FreshRun:
    """A pytest plugin that serves the host, and in each child is one requested run."""

    def __init__(self, server: FreshServer) -> None:
        self._server = server
        self.asked: Asked | None = None
        self.failures: list[str] = []
        self._snapshot: RunnerState | None = None
        self._recorder = OutcomeRecorder(ROOT)
        self._canaries: list[pytest.Item] = []
        self._error: BaseException | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(
        self, early_config: pytest.Config, args: list[str]
    ) -> Generator[None, None, None]:
        """Where a conftest.py may take part in pytest's start, serve from here on. Notes why one failed."""
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
        """Serve from here on. What the child collects then is what it was asked for."""
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

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what could not be imported."""
        if report.failed:
            self.failures.append(f"{report.nodeid}: {str(report.longrepr)[-400:]}")

    def pytest_exception_interact(self, call: pytest.CallInfo, report: object) -> None:
        """Remember what an import of a test file ended in."""
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            error = call.excinfo.value
            self._error = self._error or error.__cause__ or error

    def pytest_internalerror(self, excrepr: object, excinfo: pytest.ExceptionInfo) -> None:
        """Remember what ended pytest."""
        self._error = self._error or excinfo.value
        self.failures.append(str(excrepr)[-1500:])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that were asked for, or tell which there are, and end the process."""
        assert self._snapshot is not None
        assert self.asked is not None
        self._snapshot.renew_hooks()
        canaries, items = split_canaries(session)
        if "collect" in self.asked.request:
            self._tell_collected(items)
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
        """Tell that no test came to run, and why."""
        assert self.asked is not None
        if "collect" in self.asked.request:
            self._tell_collected({})
            return
        error = self._error or ImportError("pytest found none of the tests")
        tests = self.asked.request["tests"]
        report_import_failure(self.asked.send, tests, error, self._recorder)
        self._send_end({})

    def _tell_collected(self, tests: dict[str, pytest.Item]) -> None:
        """Tests, files that cannot be imported, and what of it all need not be done again by later runs."""
        assert self.asked is not None
        new = [name for name in sys.modules if name not in self.asked.modules]
        modules = [name for name in new if _is_standard(name)]
        codes = {path: marshal.dumps(code).hex() for path, code in self.asked.finder.codes.items()}
        told = {"tests": list(tests), "errors": self.failures, "modules": modules, "codes": codes}
        told["test_places"] = place_tests(ROOT, tests)
        self._send_end({"collected": told})

    def _send_end(self, told: dict) -> None:
        done = {"violations": [], "seconds": 0.0, "cpu_seconds": 0.0}
        assert self.asked is not None
        self.asked.send({"done": True, "route": "fresh", **done, **told})


def _is_standard(name: str) -> bool:
    place = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
    return place.startswith(sys.prefix + "/") or place in ("built-in", "frozen")


def main(descriptor: int, filter_descriptor: int) -> None:
    """Serve the host on a socket."""
    protect_server()
    with open(filter_descriptor, "rb") as file:
        allowed = file.read()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    run = FreshRun(FreshServer(control, allowed))
    code: object = None
    try:
        code = pytest.main([*_PYTEST_ARGUMENTS, *read_options(ROOT)], plugins=[run])
    finally:
        if run.asked is not None:
            try:
                run.end()
            finally:
                os._exit(0)
    raise SystemExit(f"pytest ended with {code!r} before serving: {' | '.join(run.failures[:3])}")
