"""`ostinato chat` as a person sees it: a real terminal, a real sandbox with real tests, a gateway over
a real socket. Only the model is scripted.
"""

import asyncio
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS
from tests.fakes.toy_gateway import (
    BROKEN,
    PRISTINE,
    Toy,
    make_renderer,
    make_toy_gateway,
    toy_repository,
)

DEADLINE_SECONDS = 500.0
pytestmark = pytest.mark.timeout(600)
CONTROL_C, END_OF_INPUT = b"\x03", b"\x04"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass
class Terminal:
    """The person's side of a pseudo terminal."""

    descriptor: int
    text: str = ""
    position: int = 0

    def wait_for(self, words: str) -> str:
        """Everything shown since the last wait, up to and with `words`."""
        ends_at = time.monotonic() + DEADLINE_SECONDS
        poll = select.poll()  # unlike select, it takes descriptors above 1,023
        poll.register(self.descriptor)
        while words not in self.text[self.position :]:
            if poll.poll(1_000):
                try:
                    data = os.read(self.descriptor, 65536)
                except OSError:  # the other side is closed
                    data = b""
                if not data:
                    break
                self.text += _COLOURS.sub("", data.decode(errors="replace")).replace("\r", "")
            assert time.monotonic() < ends_at, f"no {words!r} in {self.text[-3000:]}"
        end = self.text.find(words, self.position)
        assert end >= 0, f"ended without {words!r}: {self.text[-3000:]}"
        shown, self.position = self.text[self.position : end + len(words)], end + len(words)
        return shown

    def type(self, data: bytes) -> None:
        os.write(self.descriptor, data)


@dataclass
class Session:
    """What was shown at each step, and the file at that moment."""

    shown: dict[str, str] = field(default_factory=dict)
    file: dict[str, str] = field(default_factory=dict)
    exit_code: int = -1
    signals: list[str] = field(default_factory=list)


@contextmanager
def serving(toy: Toy) -> Iterator[str]:
    """The gateway on a thread of its own."""
    loop, ready, urls = asyncio.new_event_loop(), threading.Event(), []
    stopping = asyncio.Event()

    async def serve() -> None:
        async with running_server(toy.app, "127.0.0.1", 0) as url:
            urls.append(url)
            ready.set()
            await stopping.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(60)
        loop.close()


@contextmanager
def chatting(repository: Path, url: str, home: Path) -> Iterator[tuple[Terminal, subprocess.Popen]]:
    """The command, started in a terminal of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from ostinato.flows.cli import main; main()", "chat"),
            *("--repo", str(repository)),
            *("--gateway", url, "--api-key", "key-of-team"),
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "OSTINATO_HOME": str(home), "TERM": "xterm", "COLUMNS": "200"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    directory = tmp_path_factory.mktemp("chat")
    repository = toy_repository(directory / "repository").directory
    path = repository / "pkg" / "first.py"
    path.write_text(BROKEN)
    toy = make_toy_gateway(directory, make_renderer())
    told = Session()
    with serving(toy) as url, chatting(repository, url, directory / "home") as (terminal, process):

        def step(name: str, typed: bytes, words: str) -> None:
            terminal.type(typed)
            told.shown[name] = terminal.wait_for(words)
            told.file[name] = path.read_text()

        told.shown["opening"] = terminal.wait_for("you> ")
        step("work", b"Fix first in pkg/first.py\n", "[r]evert: ")
        step("not yet", b"n\n", "you> ")
        step("diff", b"/diff\n", "you> ")
        step("apply", b"/apply\n", "you> ")

        async def hang() -> None:
            await asyncio.sleep(3600)

        toy.model.wait = hang
        terminal.type(b"Do it again\n")
        while len(toy.model.requests) < 4:
            time.sleep(0.05)
        step("stopped", CONTROL_C, "you> ")
        terminal.type(END_OF_INPUT)
        told.exit_code = process.wait(60)
    rows = toy.ledger.interactions.since(0)
    told.signals = [said.signal for row in rows for said in row.feedback]
    return told


def test_the_opening_says_what_is_served_and_where(session: Session) -> None:
    assert "ostinato at http://127.0.0.1" in session.shown["opening"]
    assert "compact dialect; tests: tests" in session.shown["opening"]


def test_calls_results_tests_and_the_diff_are_shown(session: Session) -> None:
    shown = session.shown["work"]
    assert "● read_file pkg/first.py::first" in shown
    assert "<L2>    return items[1]" in shown
    assert "● run_terminal pytest" in shown
    assert "    passed" in shown
    assert "-    return items[1]" in shown
    assert "+    return items[0]" in shown
    assert "Fixed." in shown


def test_nothing_is_written_before_the_person_agrees(session: Session) -> None:
    assert session.file["work"] == session.file["not yet"] == session.file["diff"] == BROKEN
    assert "+    return items[0]" in session.shown["diff"]
    assert session.file["apply"] == PRISTINE["pkg/first.py"].decode()
    assert "written: pkg/first.py" in session.shown["apply"]


def test_control_c_stops_the_work_and_not_the_chat(session: Session) -> None:
    assert "stopped" in session.shown["stopped"]
    assert session.exit_code == 0


def test_the_gateway_hears_that_the_edit_was_kept(session: Session) -> None:
    assert [said for said in session.signals if said not in GATEWAY_SIGNALS] == ["edit_kept"]
