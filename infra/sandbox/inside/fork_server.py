"""Process 1 of a verdict box: pytest, the package and its tests are imported once, each run is a
fork.

The requests open and run: one run after the other, each a child with a deadline that reports through a
pipe (children.py). Runs inside the box.
"""

import os
import socket
import sys
import types
from collections.abc import Generator
from functools import partial

import pytest

from ostinato.infra.sandbox.inside.children import Runs
from ostinato.infra.sandbox.inside.hot_swap import SwapIndex
from ostinato.infra.sandbox.inside.integrity import TestCodes, take_snapshot
from ostinato.infra.sandbox.inside.process import protect_server
from ostinato.infra.sandbox.inside.sources import MemoryFinder, read_options
from ostinato.infra.sandbox.inside.test_runner import (
    CANARY,
    Recorder,
    Shared,
    freeze_memory,
    run_child,
    split_canaries,
)
from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame

ROOT = "/repo"
PYTEST_ARGUMENTS = [
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


class ForkServer:
    """A pytest plugin whose test loop serves the host instead of running everything."""

    def __init__(
        self, control: socket.socket, decoder: FrameDecoder, finder: MemoryFinder, opening: dict
    ) -> None:
        self._control = control
        self._decoder = decoder
        self._finder = finder
        self._opening = opening
        self._ran_on_import: set[types.CodeType] = set()
        self._collection_errors: list[str] = []
        self.load_error: dict[str, str] | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self) -> Generator[None, None, None]:
        """Note functions that run while a conftest.py, and later the tests, are imported: those cannot be
        swapped later. Remember why a conftest.py failed: then pytest ends before it serves.
        """
        ran, root = self._ran_on_import, ROOT + "/"

        def note(frame: types.FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(root):
                ran.add(frame.f_code)

        sys.setprofile(note)
        try:
            return (yield)
        except BaseException as error:
            cause = error.__cause__ or error
            self.load_error = {"error_type": type(cause).__name__, "message": str(cause)[:400]}
            raise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what could not be imported."""
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}: {str(report.longrepr)[-400:]}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Remember why pytest gave up, for the message of the process's end."""
        self._collection_errors.append(str(excrepr)[-1500:])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer the host until it closes the socket."""
        sys.setprofile(None)
        canaries, items = split_canaries(session)
        recorder = Recorder(ROOT, test_codes=TestCodes(ROOT, items))
        session.config.pluginmanager.register(recorder, "ostinato-recorder")
        shared = Shared(
            session=session,
            finder=self._finder,
            index=SwapIndex.build(ROOT, self._finder.sources, self._ran_on_import),
            items=items,
            canaries=canaries,
            snapshot=take_snapshot(session.config.pluginmanager),
            recorder=recorder,
            limits=self._opening["limits"],
        )
        freeze_memory()
        self._send(
            {
                "id": self._opening["id"],
                "tests": list(items),
                "collection_errors": self._collection_errors,
                "load_error": None,
            }
        )
        self._serve(shared)
        return True

    def _serve(self, shared: Shared) -> None:
        runs = Runs(self._control.fileno())
        while data := self._control.recv(1 << 18):
            for request, blobs in self._decoder.feed(data):
                changed: dict[str, bytes | None] = dict(zip(request["paths"], blobs, strict=True))
                changed.update(dict.fromkeys(request["removed"]))
                run = runs.start(request, partial(run_child, shared, request, changed))
                self._send(runs.finish(run))
        os._exit(0)

    def _send(self, header: dict) -> None:
        self._control.sendall(encode_frame(header))


def _receive_opening(control: socket.socket) -> tuple[FrameDecoder, dict, MemoryFinder] | None:
    """The first request. Only the finder holds its sources: no stack frame below the tests does."""
    decoder = FrameDecoder()
    frames: list[tuple[dict, list[bytes]]] = []
    while not frames:
        data = control.recv(1 << 18)
        if not data:
            return None
        frames = decoder.feed(data)
    opening, blobs = frames[0]
    return decoder, opening, MemoryFinder(ROOT, dict(zip(opening["paths"], blobs, strict=True)))


def main(descriptor: int) -> None:
    """Receive the repository, import it and serve."""
    protect_server()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    received = _receive_opening(control)
    if received is None:
        return
    decoder, opening, finder = received
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, ROOT)
    tests = [os.path.join(ROOT, path) for path in opening["test_paths"]]
    server = ForkServer(control, decoder, finder, opening)
    try:
        code = pytest.main([*PYTEST_ARGUMENTS, *read_options(ROOT), *tests], plugins=[server])
    finally:
        if server.load_error is not None:
            told = {"tests": [], "collection_errors": [], "load_error": server.load_error}
            control.sendall(encode_frame({"id": opening["id"], **told}))
    raise SystemExit(
        f"pytest ended with {code!r} before serving: {' | '.join(server._collection_errors[:3])}"
    )
