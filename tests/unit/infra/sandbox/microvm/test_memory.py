"""Private pages of a stopped process are found exactly, and laid into another one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.microvm.machine import (
    PAGE_BYTES,
    read_dirty_pages,
    write_pages,
)

PAGES = 3000
# Maps a file privately as QEMU does, reads some pages, writes some, and answers what it sees.
HOLDER = """
import mmap, sys
path, written = sys.argv[1], [int(text) for text in sys.argv[2].split(",") if text]
with open(path, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
for page in range(0, len(memory) // 4096, 7):
    memory[page * 4096]
for page in written:
    memory[page * 4096 + 5] = 200
print("ready", flush=True)
for line in sys.stdin:
    print(memory[int(line)], flush=True)
"""


@pytest.fixture
def hold(tmp_path):
    processes = []
    path = tmp_path / "memory"
    path.write_bytes(b"\1" * PAGES * PAGE_BYTES)

    def start(written: list[int]) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), ",".join(map(str, written))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process, path

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def look(process: subprocess.Popen[str], place: int) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{place}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_exactly_the_written_pages_are_read_and_can_be_laid_into_another(hold):
    written = [0, 1, 2, 40, *range(500, 1700), PAGES - 1]
    source, path = hold(written)
    os.kill(source.pid, signal.SIGSTOP)
    pages = read_dirty_pages(source.pid, path)
    assert pages.numbers.tolist() == written
    target, _ = hold([3])
    write_pages(target.pid, path, pages)
    assert [look(target, page * PAGE_BYTES + 5) for page in (0, 3, 4, 1699, PAGES - 1)] == [
        200,
        200,
        1,
        200,
        200,
    ]
    assert path.read_bytes() == b"\1" * PAGES * PAGE_BYTES


def test_a_process_that_does_not_map_the_file_is_refused(hold, tmp_path):
    source, _ = hold([])
    other = tmp_path / "other"
    other.write_bytes(b"")
    with pytest.raises(SandboxError, match="does not map"):
        read_dirty_pages(source.pid, other)
