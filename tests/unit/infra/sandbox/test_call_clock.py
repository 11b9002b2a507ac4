"""The clock of watched calls: other work on the machine does not count, computing and sleeping do."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ostinato.infra.sandbox.inside.trials.watched_calls import read_call_seconds


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Three processes per core that never wait."""
    count = 3 * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.5)
    yield
    for process in busy:
        process.kill()
        process.wait()


def test_a_call_on_a_busy_machine_takes_the_time_that_it_computes(busy_machine: None) -> None:
    wall, ours, processor = time.perf_counter(), read_call_seconds(), time.process_time()
    while time.process_time() < processor + 0.5:
        pass
    wall, ours = time.perf_counter() - wall, read_call_seconds() - ours
    assert wall > 0.9  # other processes had the core for as long
    # pauses by a hypervisor and switches between processes stay in, so not all of the waiting need be out
    assert 0.4 < ours < 0.5 + (wall - 0.5) / 2


def test_a_sleep_counts_on_a_busy_machine(busy_machine: None) -> None:
    ours = read_call_seconds()
    time.sleep(0.2)
    assert read_call_seconds() - ours == pytest.approx(0.2, abs=0.05)
