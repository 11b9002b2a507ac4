"""Process 1 of a box for test runs: it has imported pytest and no repository, and each run is a fork that
imports its own.

A run's files go from the host's socket into a pipe of the child without being read here, so that
nothing of one run is in the memory that the next is forked from. What a child need not do again is
done before: pytest's own start, and modules of the standard library that the host names. Runs
inside the box.
"""

import contextlib
import importlib
import json
import marshal
import os
import socket
import struct
import sys
from collections.abc import Generator
from functools import partial

import pytest

from ostinato.infra.sandbox.inside.children import Runs
from ostinato.infra.sandbox.inside.integrity import Snapshot, TestCodes, take_snapshot
from ostinato.infra.sandbox.inside.process import protect_server
from ostinato.infra.sandbox.inside.sources import MemoryFinder
from ostinato.infra.sandbox.inside.test_runner import (
    CANARY,
    Recorder,
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
        self._allowed = allowed
        self._tried: set[str] = set()

    def serve(self) -> None:
        """Answer the host until it closes the socket."""
        opening, _ = self._read_header()
        _import_pytest()
        self._send({"id": opening["id"]})
        limits = opening["limits"]
        runs = Runs(self._control.fileno(), self._allowed, limits)
        while True:
            request, sizes = self._read_header()
            self._import_modules(request["modules"])
            source, sink = os.pipe()
            become = partial(_run_fresh, request, sizes, source, sink, limits)
            run = runs.start(request, become)
            os.close(source)
            self._forward(sum(sizes), sink)
            self._send(runs.finish(run))

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


class FreshRun:
    """A pytest plugin whose test loop is one requested run."""

    def __init__(self, request: dict, finder: MemoryFinder, limits: dict, send: Sender) -> None:
        self._request = request
        self._finder = finder
        self._limits = limits
        self._send = send
        self._known = frozenset(sys.modules)
        self._snapshot: Snapshot | None = None
        self._recorder = Recorder(ROOT)
        self._error: BaseException | None = None
        self._failures: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(
        self, early_config: pytest.Config
    ) -> Generator[None, None, None]:
        """Takes the snapshot before any code of the repository runs. Notes why a conftest.py failed."""
        self._snapshot = take_snapshot(early_config.pluginmanager)
        try:
            return (yield)
        except BaseException as error:
            self._error = error.__cause__ or error
            self._failures.append(f"{type(self._error).__name__}: {self._error}"[-400:])
            raise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what could not be imported."""
        if report.failed:
            self._failures.append(f"{report.nodeid}: {str(report.longrepr)[-400:]}")

    def pytest_exception_interact(self, call: pytest.CallInfo, report: object) -> None:
        """Remember what an import of a test file ended in."""
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            error = call.excinfo.value
            self._error = self._error or error.__cause__ or error

    def pytest_internalerror(self, excrepr: object, excinfo: pytest.ExceptionInfo) -> None:
        """Remember what ended pytest."""
        self._error = self._error or excinfo.value
        self._failures.append(str(excrepr)[-1500:])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that were asked for, or tell which there are, and end the process."""
        assert self._snapshot is not None
        self._snapshot.renew_hooks()
        canaries, items = split_canaries(session)
        if "collect" in self._request:
            self._tell_collected(list(items))
            os._exit(0)
        if self._error is None:
            self._recorder.test_codes = TestCodes(ROOT, items)
            session.config.pluginmanager.register(self._recorder, "ostinato-recorder")
            self._snapshot.renew_hooks()
            shared = Shared(
                items=items,
                canaries=canaries,
                snapshot=self._snapshot,
                recorder=self._recorder,
                limits=self._limits,
            )
            run_child(shared, self._request, self._send)
            os._exit(0)
        return True

    def end(self) -> None:
        """Tell that no test came to run, and why."""
        if "collect" in self._request:
            self._tell_collected([])
            return
        error = self._error or ImportError("pytest found none of the tests")
        report_import_failure(self._send, self._request["tests"], error, self._recorder)
        self._send_end({})

    def _tell_collected(self, tests: list[str]) -> None:
        """Tests, files that cannot be imported, and what of it all need not be done again by later runs."""
        modules = [name for name in sys.modules if name not in self._known and _is_standard(name)]
        codes = {path: marshal.dumps(code).hex() for path, code in self._finder.codes.items()}
        told = {"tests": tests, "errors": self._failures, "modules": modules, "codes": codes}
        self._send_end({"collected": told})

    def _send_end(self, told: dict) -> None:
        done = {"violations": [], "seconds": 0.0, "cpu_seconds": 0.0}
        self._send({"done": True, "route": "fresh", **done, **told})


def _is_standard(name: str) -> bool:
    place = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
    return place.startswith(sys.prefix + "/") or place in ("built-in", "frozen")


def _run_fresh(
    request: dict, sizes: list[int], source: int, sink: int, limits: dict, send: Sender
) -> None:
    """All that a child does: read its files, import what the tests need, run them."""
    os.close(sink)
    with open(source, "rb") as pipe:
        blobs = [pipe.read(size) for size in sizes]
    files = dict(zip(request["paths"], blobs, strict=False))
    codes = dict(zip(request["compiled"], blobs[len(files) :], strict=True))
    finder = MemoryFinder(ROOT, files, codes)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, ROOT)
    wanted = request.get("collect") or [test.partition("::")[0] for test in request["tests"]]
    places = {os.path.join(ROOT, path) for path in wanted}
    run = FreshRun(request, finder, limits, send)
    del files, codes, blobs
    try:
        pytest.main([*_PYTEST_ARGUMENTS, *sorted(filter(os.path.exists, places))], plugins=[run])
    finally:
        run.end()


def _import_pytest() -> None:
    """Everything that a run of pytest imports, so that no child has to."""
    pytest.main([*_PYTEST_ARGUMENTS, "--collect-only", "--quiet"])
    freeze_memory()


def main(descriptor: int, filter_descriptor: int) -> None:
    """Serve the host on a socket."""
    protect_server()
    with open(filter_descriptor, "rb") as file:
        allowed = file.read()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    FreshServer(control, allowed).serve()
