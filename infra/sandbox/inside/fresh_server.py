"""Process 1 of a box that imports no repository: each run is a fork that imports its own.

A run's files go from the host's socket into a pipe of the child without being read here, so that
nothing of one run is in the memory that the next is forked from. Slower than fork_server.py by the
import of the package and of the tests that are asked for. Runs inside the box.
"""

import json
import os
import socket
import struct
import sys
from collections.abc import Generator
from functools import partial

import pytest

from ostinato.infra.sandbox.inside.children import Runs
from ostinato.infra.sandbox.inside.fork_server import PYTEST_ARGUMENTS, ROOT
from ostinato.infra.sandbox.inside.hot_swap import SwapIndex
from ostinato.infra.sandbox.inside.integrity import Snapshot, TestCodes, take_snapshot
from ostinato.infra.sandbox.inside.process import protect_server
from ostinato.infra.sandbox.inside.sources import MemoryFinder, read_options
from ostinato.infra.sandbox.inside.test_runner import (
    Recorder,
    Sender,
    Shared,
    freeze_memory,
    report_import_failure,
    run_child,
    split_canaries,
)
from ostinato.infra.sandbox.inside.wire import encode_frame

_PREFIX = struct.Struct(">II")


class FreshServer:
    """Server that forks a child per request and never reads the files that the request brings."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def serve(self) -> None:
        """Answer the host until it closes the socket."""
        opening, _ = self._read_header()
        _import_pytest()
        self._send({"id": opening["id"]})
        runs = Runs(self._control.fileno())
        while True:
            request, sizes = self._read_header()
            source, sink = os.pipe()
            become = partial(_run_fresh, request, sizes, source, sink, opening["limits"])
            run = runs.start(request, become)
            os.close(source)
            self._forward(sum(sizes), sink)
            self._send(runs.finish(run))

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
        self._snapshot: Snapshot | None = None
        self._recorder = Recorder(ROOT)
        self._error: BaseException | None = None

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
            raise

    def pytest_exception_interact(self, call: pytest.CallInfo, report: object) -> None:
        """Remember what an import of a test file ended in."""
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            error = call.excinfo.value
            self._error = self._error or error.__cause__ or error

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo) -> None:
        """Remember what ended pytest."""
        self._error = self._error or excinfo.value

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that were asked for and end the process."""
        assert self._snapshot is not None
        self._snapshot.renew_hooks()
        canaries, items = split_canaries(session)
        if self._error is None:
            self._recorder.test_codes = TestCodes(ROOT, items)
            session.config.pluginmanager.register(self._recorder, "ostinato-recorder")
            self._snapshot.renew_hooks()
            shared = Shared(
                session=session,
                finder=self._finder,
                index=SwapIndex(),
                items=items,
                canaries=canaries,
                snapshot=self._snapshot,
                recorder=self._recorder,
                limits=self._limits,
            )
            run_child(shared, self._request, {}, self._send)
            os._exit(0)
        return True

    def report_failure(self) -> None:
        """Tell that no test came to run, and why."""
        error = self._error or ImportError("pytest found none of the tests")
        report_import_failure(self._send, self._request["tests"], error, self._recorder)
        done = {"violations": [], "seconds": 0.0, "cpu_seconds": 0.0}
        self._send({"done": True, "route": "fresh", **done})


def _run_fresh(
    request: dict, sizes: list[int], source: int, sink: int, limits: dict, send: Sender
) -> None:
    """All that a child does: read its files, import what the tests need, run them."""
    os.close(sink)
    with open(source, "rb") as pipe:
        files = {path: pipe.read(size) for path, size in zip(request["paths"], sizes, strict=True)}
    finder = MemoryFinder(ROOT, files)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, ROOT)
    places = {os.path.join(ROOT, test.partition("::")[0]) for test in request["tests"]}
    run = FreshRun({**request, "route": "fresh"}, finder, limits, send)
    del files
    try:
        options = [*PYTEST_ARGUMENTS, *read_options(ROOT)]
        pytest.main([*options, *sorted(filter(os.path.exists, places))], plugins=[run])
    finally:
        run.report_failure()


def _import_pytest() -> None:
    """Everything that a run of pytest imports, so that no child has to."""
    pytest.main([*PYTEST_ARGUMENTS, "--collect-only", "--quiet"])
    freeze_memory()


def main(descriptor: int) -> None:
    """Serve the host on a socket."""
    protect_server()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    FreshServer(control).serve()
