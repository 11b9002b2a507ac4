"""A burst of boxes through the sandbox fleet: `python -m tests.benchmarks.sandbox_fleet [--quick]`.

A fleet of one node on this machine is asked for 2,000 namespace boxes at once (100 with `--quick`) and
keeps them all alive. The burst stops early when memory runs short, and ends every box it made. Then
the scheduler alone decides for 500 nodes in memory: decisions per second of processor time.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import time
from pathlib import Path

import psutil

from ostinato.infra.platform.errors import CapacityExhausted
from ostinato.infra.sandbox.fleet.client import LeasedBox
from ostinato.infra.sandbox.fleet.node import NodeDaemon
from ostinato.infra.sandbox.fleet.pressure import read_pressure
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    FleetPolicy,
    NodeSpec,
    Resources,
    Template,
)
from ostinato.infra.sandbox.fleet.service import FleetService
from ostinato.infra.sandbox.host.backend import NamespaceBackend
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec
from tests.fakes.repositories import WORDKIT, open_repository
from tests.unit.infra.sandbox.fleet.toy_fleet import ToyFleet

BOXES, QUICK_BOXES = 2_000, 100
FREE_MEMORY_FLOOR_BYTES = 3 << 30
BURST_SECONDS = 480.0
NUM_SINGLE_STARTS = 30
NUM_PLAIN_STARTS = 100
DECIDING_NODES, DECIDED_BOXES = 500, 3_000
_MIB = 1 << 20
_TEMPLATE = Template(
    name="wordkit", declared=Resources(cpus=0.01, memory_bytes=4 * _MIB, disk_bytes=_MIB)
)
Figures = dict[str, float]


class Burst:
    """One real fleet on this machine, from the first start to the last box's end."""

    def __init__(self, num_boxes: int) -> None:
        self.num_boxes = num_boxes
        self.backend = NamespaceBackend()
        limits = SandboxLimits(memory_bytes=64 * _MIB, start_seconds=120.0)
        repository = open_repository(WORDKIT).directory.resolve()
        self.spec = SandboxSpec(repository=repository, limits=limits)
        num_cpus = os.cpu_count() or 1
        node = NodeSpec(
            node_id="here",
            capacity=Resources(
                cpus=num_cpus,
                memory_bytes=psutil.virtual_memory().total,
                disk_bytes=psutil.disk_usage("/").total,
            ),
            starts_per_second=10_000.0,  # as fast as it goes: that is what is measured
            start_burst=10_000,
            most_starting=2 * num_cpus,
            cpu_overcommit_ratio=64.0,
        )
        self.daemon = NodeDaemon(node, self.make, lambda: read_pressure(Path("/tmp")))
        policy = FleetPolicy(
            # a busy machine is what a burst makes; it must not stop the burst
            uses_observations=False,
            node_silence_seconds=BURST_SECONDS,
            start_seconds=120.0,
            heartbeat_seconds=5.0,
        )
        self.service = FleetService([_TEMPLATE], policy)
        self._children_before = set(psutil.Process().children(recursive=True))

    async def make(self, template: str) -> Sandbox:
        """A box of the backend."""
        return await self.backend.create(self.spec)

    async def run(self) -> Figures:
        """Everything, and the boxes gone whatever happens."""
        try:
            return await self._measure()
        finally:
            await self.service.close()
            await self.daemon.close()
            await self.backend.close()

    async def _measure(self) -> Figures:
        single_seconds = await self._start_singly()
        await self.service.start()
        await self.service.add_node(self.daemon.spec, self.daemon)
        available_bytes = psutil.virtual_memory().available
        own_cpu_seconds = _own_cpu_seconds()
        started_at = time.perf_counter()
        waits, boxes_held = await self._ask_for_all()
        burst_seconds = time.perf_counter() - started_at
        boxes = self._box_processes()
        alive = self.daemon.num_boxes
        if alive == 0:
            raise RuntimeError("no box started; run tests.benchmarks.sandbox to see why")
        cpu_seconds = _own_cpu_seconds() - own_cpu_seconds + sum(map(_cpu_seconds, boxes))
        figures = {
            "real_boxes_alive": float(alive),
            "real_starts_per_second": alive / burst_seconds,
            "real_wait_p50_seconds": statistics.median(waits),
            "real_wait_worst_seconds": max(waits),
            "real_start_cpu_milliseconds": 1e3 * cpu_seconds / alive,
            "real_single_start_p50_milliseconds": 1e3 * statistics.median(single_seconds),
            "real_processes_per_box": len(boxes) / alive,
            "real_pss_per_box_mib": sum(map(_pss_bytes, boxes)) / alive / _MIB,
            "real_memory_per_box_mib": (available_bytes - psutil.virtual_memory().available)
            / alive
            / _MIB,
            "load_per_cpu": read_pressure(Path("/tmp")).load_per_cpu,
        }
        figures["real_answering_boxes"] = float(await self._count_answers(boxes_held))
        await self.service.close()  # or it replaces the boxes that are ended
        started_at = time.perf_counter()
        await self.daemon.close()
        figures["real_kill_all_seconds"] = time.perf_counter() - started_at
        figures["real_left_processes"] = float(len(self._box_processes()))
        figures["plain_process_starts_per_second"] = _start_plain_processes()
        return figures

    async def _start_singly(self) -> list[float]:
        """Durations of starts one after another."""
        seconds = []
        for _ in range(NUM_SINGLE_STARTS):
            started_at = time.perf_counter()
            box = await self.make("wordkit")
            seconds.append(time.perf_counter() - started_at)
            await box.close()
        return seconds

    async def _ask_for_all(self) -> tuple[list[float], list[LeasedBox]]:
        """Waits of all requests, and their boxes; asking ends when memory runs short or time is up."""
        waits: list[float] = []
        boxes: list[LeasedBox] = []

        async def ask(number: int) -> None:
            asked_at = time.perf_counter()
            request = BoxRequest(
                request_id=f"burst-{number}",
                template="wordkit",
                lease_seconds=10 * BURST_SECONDS,
                wait_seconds=BURST_SECONDS,
            )
            try:
                grant = await self.service.acquire(request)
            except CapacityExhausted:
                return
            boxes.append(LeasedBox(grant, self.daemon, self._give_back))
            waits.append(time.perf_counter() - asked_at)

        tasks = [asyncio.create_task(ask(number)) for number in range(self.num_boxes)]
        watch = asyncio.create_task(_watch_memory(tasks))
        await asyncio.wait(tasks, timeout=BURST_SECONDS)
        watch.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, watch, return_exceptions=True)
        return waits, boxes

    async def _give_back(self, box: LeasedBox) -> None:
        self.service.release(box.request_id)

    async def _count_answers(self, boxes: list[LeasedBox]) -> int:
        """Boxes that run a command now, all of them asked."""
        return sum([(await box.exec("echo here", 60)).output == b"here\n" for box in boxes])

    def _box_processes(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child not in self._children_before]


async def _watch_memory(tasks: list[asyncio.Task[None]]) -> None:
    while psutil.virtual_memory().available > FREE_MEMORY_FLOOR_BYTES:
        await asyncio.sleep(0.1)
    print("memory is short: the burst stops here")
    for task in tasks:
        task.cancel()


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process of one thread; a start takes less than the kernel's clock tick, which
    psutil counts in.
    """
    nanoseconds = Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]
    return int(nanoseconds) / 1e9


def _pss_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _start_plain_processes() -> float:
    """Processes a second without any box around them: the floor of what this machine can do."""
    started_at = time.perf_counter()
    processes = [subprocess.Popen(["/bin/sleep", "60"]) for _ in range(NUM_PLAIN_STARTS)]
    rate = NUM_PLAIN_STARTS / (time.perf_counter() - started_at)
    for process in processes:
        process.kill()
        process.wait()
    return rate


def decide(num_nodes: int, num_requests: int) -> Figures:
    """Requests placed and taken back by the scheduler per second of its processor time."""
    fleet = ToyFleet.of(num_nodes, starts_per_second=1e6, start_burst=1_000_000)
    started = time.process_time()
    for _ in range(num_requests):
        fleet.ask(lease_seconds=1e6)
    fleet.tick(0.01)
    fleet.deliver()
    spent = time.process_time() - started
    return {
        "decided_boxes": float(len(fleet.granted())),
        "decisions_per_cpu_second": len(fleet.granted()) / spent,
    }


def judge(figures: Figures, *, quick: bool) -> tuple[dict[str, float], bool]:
    """Targets (lower bounds, save for those that must be zero) and whether all are met."""
    num_boxes = float(QUICK_BOXES if quick else BOXES)
    at_least = {
        "real_boxes_alive": num_boxes,
        "real_answering_boxes": num_boxes,
        "decided_boxes": float(DECIDED_BOXES),
        "decisions_per_cpu_second": 500.0,
    }
    zero = {"real_left_processes": 0.0}
    met = all(figures[name] >= bound for name, bound in at_least.items())
    return at_least | zero, met and all(figures[name] == 0.0 for name in zero)


def main() -> None:
    """Print figures and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 boxes")
    options = parser.parse_args()
    burst = Burst(QUICK_BOXES if options.quick else BOXES)
    figures = asyncio.run(burst.run()) | decide(DECIDING_NODES, DECIDED_BOXES)
    for name, value in figures.items():
        print(f"{name:>42} {value:12,.2f}")
    targets, met = judge(figures, quick=options.quick)
    print(json.dumps({"name": "sandbox_fleet", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
