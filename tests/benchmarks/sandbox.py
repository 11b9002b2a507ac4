"""What boxes, snapshots, forks and verdicts cost: `python -m tests.benchmarks.sandbox [--quick]`.

A tiny repository, so these are the fixed costs, beside the same commands without any box in the same
run (the baseline). Wall times depend on what else the machine does: its load is in the figures.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2

from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import SandboxSpec
from ostinato.infra.sandbox.test_server import TestServer
from tests.fakes.repositories import WORDKIT, open_repository
from tests.fakes.sandbox_server import serving

TARGETS_MS = {
    "create": 10.0,
    "exec": 1.5,
    "snapshot_200": 10.0,
    "fork": 30.0,
    "lease_of_group": 20.0,
    "rented": 15.0,
    "verdict_wall": 60.0,
}
TARGETS_PER_SECOND = {"creates_per_second": 150.0}
_PATH = "wordkit/counting.py"
_EDIT = "for n in $(seq 200); do head -c 11000 /dev/urandom > file$n; done"
_STARTS_AT_A_TIME = 8


async def time_ms(action: Callable[[int], Awaitable[object]], repeats: int) -> float:
    """Median wall time of an action that gets the number of its repeat."""
    times = []
    for number in range(repeats):
        started = time.perf_counter()
        await action(number)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


async def measure_boxes(repeats: int) -> dict[str, float]:
    """Create, exec, snapshot and fork of the namespace backend."""
    backend = open_backend()
    spec = SandboxSpec(repository=open_repository(WORDKIT).directory)
    boxes = [await backend.create(spec)]

    async def create(_: int) -> None:
        boxes.append(await backend.create(spec))

    figures = {"create": await time_ms(create, repeats)}
    for box in boxes[1:]:
        await box.close()
    box = boxes[0]
    figures["exec"] = await time_ms(lambda _: box.exec("true", 30), repeats)
    figures["read"] = await time_ms(lambda _: box.read(_PATH), repeats)
    figures["write"] = await time_ms(lambda _: box.write(_PATH, b"x = 1\n"), repeats)
    figures["diff"] = await time_ms(lambda _: box.diff(), repeats)
    await box.exec(_EDIT, 120)

    async def edit_and_snapshot(number: int) -> float:
        await box.write("file1", b"%d" % number)
        started = time.perf_counter()
        await box.snapshot()
        return 1e3 * (time.perf_counter() - started)

    snapshots = [await edit_and_snapshot(number) for number in range(max(5, repeats // 5))]
    figures["snapshot_200"] = statistics.median(snapshots)
    snapshot = await box.snapshot()

    async def fork(_: int) -> None:
        await backend.fork(snapshot)

    figures["fork"] = await time_ms(fork, repeats)
    figures["live_fork"] = await time_ms(lambda _: backend.fork(box), max(3, repeats // 5))
    await backend.close()
    return figures


async def measure_leases(repeats: int) -> dict[str, float]:
    """A new box per lease: with files that were never used before, and as one more of a group."""
    environment = RepositoryEnvironment.create(open_repository(WORDKIT), 1)

    async def lease(number: int) -> None:
        async with environment.leased({_PATH: b"broken = %d\n" % number}):
            pass

    figures = {
        "lease_first": await time_ms(lease, repeats),
        "lease_of_group": await time_ms(lambda _: lease(repeats - 1), repeats),
    }
    await environment.close()
    return figures


def processor_ms() -> float:
    """Of this process and the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return 1e3 * sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def measure_throughput(num_boxes: int) -> dict[str, float]:
    """Boxes a second when they are asked for side by side and kept, and what each costs."""
    backend = open_backend()
    spec = SandboxSpec(repository=open_repository(WORDKIT).directory)
    await backend.create(spec)
    limit = asyncio.Semaphore(_STARTS_AT_A_TIME)

    async def create() -> None:
        async with limit:
            await backend.create(spec)

    started, used_ms = time.perf_counter(), processor_ms()
    await asyncio.gather(*(create() for _ in range(num_boxes)))
    rate = num_boxes / (time.perf_counter() - started)
    await backend.close()  # bubblewrap's own time is known when it has ended
    cost_ms = (processor_ms() - used_ms) / num_boxes
    return {"creates_per_second": rate, "create_and_close_cpu": cost_ms}


async def measure_rented(repeats: int) -> dict[str, float]:
    """A sandbox of `ostinato sandboxes serve` with a pool, over HTTP by one client, ten a second."""
    times = []
    with tempfile.TemporaryDirectory() as home, serving(Path(home), "--warm", "8") as server:
        headers = {"X-API-Key": server.key}
        async with httpx2.AsyncClient(base_url=server.address, headers=headers) as client:
            for _ in range(repeats):
                await asyncio.sleep(0.1)
                started = time.perf_counter()
                made = await client.post("/v2/sandboxes", json={"templateID": "base"})
                times.append(1e3 * (time.perf_counter() - started))
                await client.delete(f"/sandboxes/{made.json()['sandboxID']}")
    return {"rented": statistics.median(times)}


def measure_baseline(repeats: int) -> dict[str, float]:
    """The same without a box: a program started, 200 files copied by `cp -a`."""

    def median_ms(arguments: list[str], count: int) -> float:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            subprocess.run(arguments, check=True)
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)

    figures = {"baseline_exec": median_ms(["/bin/true"], repeats)}
    with tempfile.TemporaryDirectory() as parent:
        source = Path(parent) / "source"
        source.mkdir()
        for number in range(200):
            (source / f"file{number}").write_bytes(os.urandom(11_000))
        copy = ["cp", "-a", "--remove-destination", f"{source}/.", f"{parent}/copy"]
        (Path(parent) / "copy").mkdir()
        figures["baseline_copy_200"] = median_ms(copy, max(5, repeats // 5))
    return figures


async def measure_verdicts(repeats: int) -> dict[str, float]:
    """Start of a test server, and uncached runs."""
    server = TestServer(open_repository(WORDKIT))
    started = time.perf_counter()
    await server.start()
    figures = {"server_start": 1e3 * (time.perf_counter() - started)}
    text = server.repository.files[_PATH]
    cpu_ms: list[float] = []

    async def run(number: int) -> None:
        files = {_PATH: text.replace(b"total += 1", f"total += {number + 2}".encode())}
        report = await server.run_again(files, server.tests[:5])
        cpu_ms.append(1e3 * report.cpu_seconds)

    figures["verdict_wall"] = await time_ms(run, repeats)
    figures["verdict_cpu"] = statistics.median(cpu_ms)
    await server.close()
    return figures


async def measure(repeats: int) -> dict[str, float]:
    """All figures: milliseconds, but rates a second and the machine's load."""
    figures = {"load_before": os.getloadavg()[0], **measure_baseline(repeats)}
    figures.update(await measure_boxes(repeats))
    figures.update(await measure_throughput(repeats * 4))
    figures.update(await measure_leases(repeats))
    figures.update(await measure_verdicts(repeats))
    figures.update(await measure_rented(repeats))
    figures["load_after"] = os.getloadavg()[0]
    return figures


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    figures = asyncio.run(measure(10 if parser.parse_args().quick else 60))
    for name, value in figures.items():
        target = TARGETS_MS.get(name) or TARGETS_PER_SECOND.get(name)
        print(f"{name:>22} {value:9.2f}" + (f"  (target {target:g})" if target else ""))
    met = all(figures.get(name, 1e9) <= target for name, target in TARGETS_MS.items())
    met = met and all(figures[name] >= target for name, target in TARGETS_PER_SECOND.items())
    targets = {**TARGETS_MS, **TARGETS_PER_SECOND}
    answer = {"name": "sandbox", "figures": figures, "targets": targets, "met": met}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
