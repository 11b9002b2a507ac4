"""Sessions of processes: checks which processes are alive, and ends whole sessions.

A supervised child leads its own session, and the processes that it starts stay in that session by default. Signals go
only to processes of such a session, and to those passed to `kill_processes`.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from ostinato.infra.platform.cluster.workspace import OWNERS, ProcessMark, read_record

_TERMINATE_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0
_CLOCK_TOLERANCE_SECONDS = 1.5
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
is_ending = threading.Event()
"""Set when this process, a supervised child, was told to end, so that its threads end their own children too."""

_HOST = socket.gethostname()
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def mark_process(pid: int) -> ProcessMark:
    """The mark of a live process of this machine."""
    started_at, booted_at = psutil.Process(pid).create_time(), psutil.boot_time()
    return ProcessMark(
        pid=pid, started_at=started_at, host=_HOST, boot_id=_BOOT_ID, booted_at=booted_at
    )


def _seconds_after_boot(pid: int) -> float:
    """Start of a live process since the boot of the kernel, which setting the clock does not change."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


def _noted_after_boot(mark: ProcessMark) -> float:
    return mark.started_at - mark.booted_at


def is_elsewhere(mark: ProcessMark) -> bool:
    """Whether the process is on another host, where its state cannot be checked from here."""
    return mark.host != _HOST


def is_alive(mark: ProcessMark) -> bool:
    """Whether this very process, not a later one with its id, runs on this host. A zombie does not."""
    if is_elsewhere(mark) or mark.boot_id != _BOOT_ID:
        return False
    try:
        return _is_same(mark) and psutil.Process(mark.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_same(mark: ProcessMark) -> bool:
    """Whether the process that has the id, alive or a zombie, is the marked one."""
    apart = abs(_seconds_after_boot(mark.pid) - _noted_after_boot(mark))
    return apart < _CLOCK_TOLERANCE_SECONDS


def live_owners(directory: Path) -> list[ProcessMark]:
    """Supervisors that wait for the child of a directory."""
    marks = [read_record(path, ProcessMark) for path in (directory / OWNERS).glob("[!.]*")]
    return [mark for mark in marks if mark is not None and is_alive(mark)]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores signals to end during the block, which already ends processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def kill_session(mark: ProcessMark, grace_seconds: float = _TERMINATE_GRACE_SECONDS) -> int:
    """Ends every process of `mark`'s session: SIGTERM, then SIGKILL. Returns how many."""
    members = _session_members(mark)
    _send(members, signal.SIGTERM)
    _send(members, signal.SIGCONT)  # a stopped process does not handle SIGTERM
    deadline = time.monotonic() + grace_seconds
    while (left := _session_members(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    while left:
        _send(left, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        left = _session_members(mark)
    return len(members)


def marked_processes(variable: str, word: str) -> dict[str, list[int]]:
    """Ids of live processes with `word` in their command, by the value of an environment variable without dashes."""
    found: dict[str, list[int]] = {}
    for pid, value, command in _live_processes(variable):
        if word in command:
            found.setdefault(value.replace("-", ""), []).append(pid)
    return found


def processes_with(variable: str, value: str, words: Sequence[str] = ()) -> Iterator[int]:
    """Ids of live processes with this environment variable and, unless `words` is empty, one of them in the command."""
    for pid, found, command in _live_processes(variable):
        if found == value and (not words or any(word in command for word in words)):
            yield pid


def _live_processes(variable: str) -> Iterator[tuple[int, str, str]]:
    """Id, value of an environment variable and command of each live process that has a value."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            value = process.environ().get(variable)
            if value and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid, value, " ".join(process.cmdline())


def kill_processes(pids: Iterable[int]) -> None:
    """Ends processes at once and waits until they are gone."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
            found[-1].kill()
    psutil.wait_procs(found, timeout=_KILL_SECONDS)


def _session_members(mark: ProcessMark) -> list[int]:
    """Live processes of the session. A session id is not reused while any member lives. A session
    whose members are all older than the mark, or whose leader is newer, is another session."""
    if is_elsewhere(mark) or mark.boot_id != _BOOT_ID:
        return []
    members = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) != mark.pid:
                continue
            created = _seconds_after_boot(process.pid)
            is_impostor = process.pid == mark.pid and not _is_same(mark)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
        is_later = created >= _noted_after_boot(mark) - _CLOCK_TOLERANCE_SECONDS
        if is_impostor:
            return []
        if is_later and process.info["status"] != psutil.STATUS_ZOMBIE:
            members.append(process.pid)
    return members


def _send(pids: list[int], signal_number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)
