"""The clock of watched calls: other work on the machine does not count, computing and sleeping do."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

# A process of its own: threads that earlier tests left in this one would count as computing.
MEASURE = """
import time
from ostinato.infra.sandbox.inside.trials.watched_calls import read_call_seconds

started, call_started = time.perf_counter(), read_call_seconds()
{work}
print(time.perf_counter() - started, read_call_seconds() - call_started)
"""
COMPUTE = """
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
"""


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


def measure(work: str) -> tuple[float, float]:
    """(wall time, call time) of some Python code in seconds."""
    code = MEASURE.format(work=work)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall, call = map(float, run.stdout.split())
    return wall, call


def test_a_call_on_a_busy_machine_takes_the_time_that_it_computes(busy_machine: None) -> None:
    wall, call = measure(COMPUTE)
    assert wall > 0.9  # other processes had the core for as long
    # pauses by a hypervisor and switches between processes stay in, so not all of the waiting need be out
    assert 0.4 < call < 0.5 + (wall - 0.5) / 2


def test_a_sleep_counts_on_a_busy_machine(busy_machine: None) -> None:
    _, call = measure("time.sleep(0.2)")
    assert call == pytest.approx(0.2, abs=0.05)
