"""What boxes and verdicts cost: `python -m tests.benchmarks.sandbox [--quick]`.

Measures a tiny repository, so these are the fixed costs. CPU time is what the test run itself used;
wall times include the host's side and depend on what else the machine does.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

from infra.sandbox import NamespaceSandbox, TestServer
from tests.fakes.repositories import WORDKIT, open_repository

TARGETS_MS = {"create": 100.0, "reset": 3.0, "exec": 5.0, "hot_wall": 20.0, "cold_wall": 60.0}
_PATH = "wordkit/counting.py"


async def time_ms(action: Callable[[int], Awaitable[object]], repeats: int) -> float:
    """Median wall time of an action that gets the number of its repeat."""
    times = []
    for number in range(repeats):
        started = time.perf_counter()
        await action(number)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


async def measure_box(repeats: int) -> dict[str, float]:
    """Create, exec, reset, diff, read and write of one box."""
    repository = open_repository(WORDKIT)
    boxes: list[NamespaceSandbox] = []

    async def create(_: int) -> None:
        boxes.append(await NamespaceSandbox.open(repository))

    figures = {"create": await time_ms(create, max(3, repeats // 5))}
    box = boxes[0]

    async def dirty_and_reset(_: int) -> None:
        await box.reset({_PATH: b"broken = True\n"})

    figures["exec"] = await time_ms(lambda _: box.exec("true", 5), repeats)
    figures["reset"] = await time_ms(dirty_and_reset, repeats)
    figures["diff"] = await time_ms(lambda _: box.diff(), repeats)
    figures["read"] = await time_ms(lambda _: box.read(_PATH), repeats)
    figures["write"] = await time_ms(lambda _: box.write(_PATH, b"x = 1\n"), repeats)
    for box in boxes:
        await box.close()
    return figures


async def measure_verdicts(repeats: int) -> dict[str, float]:
    """Start of a test server, and uncached runs by both routes."""
    server = TestServer(open_repository(WORDKIT))
    started = time.perf_counter()
    await server.start()
    figures = {"server_start": 1e3 * (time.perf_counter() - started)}
    text = server.repository.files[_PATH]
    cpu_ms: dict[bool, list[float]] = {False: [], True: []}

    async def run(number: int, *, cold: bool) -> None:
        files = {_PATH: text.replace(b"total += 1", f"total += {number + 2}".encode())}
        report = await server.run_again(files, server.tests[:5], cold=cold)
        cpu_ms[cold].append(1e3 * report.cpu_seconds)

    for name, cold in (("hot", False), ("cold", True)):
        wall = await time_ms(lambda number, cold=cold: run(number, cold=cold), repeats)
        figures[f"{name}_wall"] = wall
        figures[f"{name}_cpu"] = statistics.median(cpu_ms[cold])
    await server.close()
    return figures


async def measure(repeats: int) -> dict[str, float]:
    """All figures in milliseconds."""
    return {**await measure_box(repeats), **await measure_verdicts(repeats)}


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    figures = asyncio.run(measure(10 if parser.parse_args().quick else 60))
    for name, value in figures.items():
        target = f"  (target {TARGETS_MS[name]:.0f})" if name in TARGETS_MS else ""
        print(f"{name:>14} {value:9.2f} ms{target}")
    met = all(figures[name] <= target for name, target in TARGETS_MS.items())
    answer = {"name": "sandbox", "figures": figures, "targets": TARGETS_MS, "met": met}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
