"""Processes are told apart by id and start, and a session ends as a whole."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ostinato.infra.platform.cluster.processes import is_alive, kill_session, mark_process
from tests.fakes.processes import is_running

# starts a child that refuses to end, says its id, then waits
_FAMILY = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
child = subprocess.Popen([sys.executable, "-c", deaf + "time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def _start_family() -> tuple[subprocess.Popen[str], int]:
    leader = subprocess.Popen(
        [sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    return leader, int(leader.stdout.readline())


def test_kill_session_ends_members_that_ignore_terminate() -> None:
    leader, member = _start_family()

    assert kill_session(mark_process(leader.pid), grace_seconds=0.3) == 2
    leader.wait()
    assert not is_running(member)


def test_kill_session_ends_orphans_of_a_dead_leader() -> None:
    leader, member = _start_family()
    mark = mark_process(leader.pid)
    leader.kill()
    leader.wait()

    assert not is_alive(mark)
    assert is_running(member)
    assert kill_session(mark, grace_seconds=0.3) == 1
    assert not is_running(member)


def test_kill_session_ends_members_of_a_leader_that_dies_while_they_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, member = _start_family()
    mark = mark_process(leader.pid)
    listed, listings = psutil.process_iter, itertools.count(1)

    def _read_before_the_death(fields: list[str]) -> Iterator[psutil.Process]:
        is_early = next(listings) == 2  # the first one found both, which then got SIGTERM
        for process in listed(fields):
            if process.pid == leader.pid and is_early:
                process.info["status"] = psutil.STATUS_SLEEPING
            yield process

    monkeypatch.setattr(psutil, "process_iter", _read_before_the_death)

    assert kill_session(mark, grace_seconds=0.3) == 2
    leader.wait()
    assert not is_running(member)


def test_a_later_process_with_the_same_id_is_left_alone() -> None:
    leader, member = _start_family()
    mark = mark_process(leader.pid)
    earlier = mark.model_copy(update={"started_at": mark.started_at - 100})

    assert not is_alive(earlier)
    assert kill_session(earlier) == 0
    assert is_alive(mark)
    assert is_running(member)
    kill_session(mark, grace_seconds=0.0)
    leader.wait()


@pytest.mark.parametrize("step_seconds", [-3_600, 3_600])
def test_a_process_is_the_same_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_seconds: int
) -> None:
    leader, member = _start_family()
    mark = mark_process(leader.pid)
    for place in Path("/proc").iterdir():
        (tmp_path / place.name).symlink_to(place)
    # the kernel reports its boot by today's clock
    booted = f"btime {int(psutil.boot_time())}"
    counters = Path("/proc/stat").read_text()
    (tmp_path / "stat").unlink()
    (tmp_path / "stat").write_text(
        counters.replace(booted, f"btime {int(psutil.boot_time()) + step_seconds}")
    )
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    assert is_alive(mark)
    assert kill_session(mark, grace_seconds=0.3) == 2
    leader.wait()
    assert not is_running(member)


def test_this_process_is_alive_and_a_zombie_is_not() -> None:
    assert is_alive(mark_process(os.getpid()))
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    mark = mark_process(zombie.pid)
    while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE:
        pass

    assert not is_alive(mark)
    zombie.wait()
