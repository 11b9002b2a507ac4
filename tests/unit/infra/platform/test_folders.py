"""Laws of locks on files: one holder at a time, free when the holder is gone, also for processes of older versions."""

import fcntl
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from ostinato.infra.platform.cluster.workspace import try_lock
from ostinato.infra.platform.folders import locked
from ostinato.infra.serving.gateway.issued_keys import locked as locked_privately

IMPORTS = """
import os, sys
from pathlib import Path
from ostinato.infra.platform.cluster.workspace import try_lock
from ostinato.infra.platform.folders import locked
"""
HOLD = "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
HOLD_AND_FORK = """
with locked(Path(sys.argv[1])):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
print("released", flush=True)
"""
HOLD_AND_LEAVE_A_CHILD = """
lock = Path(sys.argv[1]).open("w")
assert try_lock(lock)
if os.fork():
    print("held", flush=True)
sys.stdin.read()
"""
BOTH = pytest.mark.parametrize("lock", [locked, locked_privately])


def run(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"{IMPORTS}\n{program}", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def is_free(path: Path) -> bool:
    try:
        with locked(path).acquire(blocking=False):
            return True
    except Timeout:
        return False


def test_another_process_holds_the_lock_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.lock"
    holder = run(HOLD, path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert not is_free(path)
    holder.kill()
    holder.wait()
    assert is_free(path)


def test_a_child_that_the_holder_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    holder = run(HOLD_AND_FORK, path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "released\n"
    assert is_free(path)  # the child lives until it has read the end of its input
    holder.communicate()


def test_a_child_that_a_killed_trainer_forked_keeps_its_lock(tmp_path: Path) -> None:
    """The next trainer then ends what is left on the device before it begins."""
    path = tmp_path / "trainer.lock"
    trainer = run(HOLD_AND_LEAVE_A_CHILD, path)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "held\n"
    trainer.kill()
    trainer.wait()
    with path.open("a+") as next_trainer:
        assert not try_lock(next_trainer)
        trainer.communicate()  # ends the child
        fcntl.flock(next_trainer, fcntl.LOCK_EX)


@BOTH
def test_one_thread_at_a_time_holds_the_lock(
    lock: Callable[[Path], FileLock], tmp_path: Path
) -> None:
    path, count = tmp_path / "one.lock", tmp_path / "count"
    count.write_text("0")

    def add(_: int) -> None:
        with lock(path):
            count.write_text(str(int(count.read_text()) + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(40)))
    assert count.read_text() == "40"


@BOTH
def test_a_process_of_an_older_version_excludes_this_one(
    lock: Callable[[Path], FileLock], tmp_path: Path
) -> None:
    with (
        lock(tmp_path / "one") as held,
        Path(held.lock_file).open("w") as older,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(older, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with Path(held.lock_file).open("w") as older:
        fcntl.flock(older, fcntl.LOCK_EX)
        with pytest.raises(Timeout):
            lock(tmp_path / "one").acquire(blocking=False)


def test_the_lock_of_keys_is_closed_to_other_users(tmp_path: Path) -> None:
    with locked_privately(tmp_path / "keys.json") as held:
        assert Path(held.lock_file).stat().st_mode & 0o777 == 0o600
