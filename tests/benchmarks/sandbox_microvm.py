"""What virtual machines cost: `python -m tests.benchmarks.sandbox_microvm [--quick] [--accelerator tcg|kvm]`.

A small image; machines fork from a template, run a command, are branched while they run with some
20 MiB of memory of their own, and end. Wall times depend on what else the host does, so the
processor time of a fork and the host's load stand beside them. `measure` is also called by
tests.benchmarks.sandbox.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import psutil

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.sandbox.microvm import Accelerator, MicroVmBackend
from ostinato.infra.sandbox.protocol import SandboxLimits, SandboxSpec

TARGETS_MS = {"create_to_ready": 200.0, "branch_pause": 40.0}
_SPEC = SandboxSpec(
    template="small", limits=SandboxLimits(memory_bytes=256 << 20, writable_bytes=64 << 20)
)
_COMMAND_SECONDS = 120.0
_DIRTY_BYTES = 16 << 20


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


async def _measure_forks(backend: MicroVmBackend, repeats: int) -> dict[str, float]:
    ready, cpu, execs, shared = [], [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        sandbox = await backend.create(_SPEC)
        ready.append(time.perf_counter() - started)
        cpu.append(sandbox.machine.cpu_seconds)
        started = time.perf_counter()
        await sandbox.exec("true", _COMMAND_SECONDS)
        execs.append(time.perf_counter() - started)
        process = psutil.Process(sandbox.machine.process_id)
        shared.append(process.memory_full_info().pss / 2**20)
        await sandbox.close()
    return {
        "create_to_ready": _median_ms(ready),
        "create_to_ready_best": 1e3 * min(ready),
        "create_processor": _median_ms(cpu),
        "exec_first": _median_ms(execs),
        "fork_pss_mebibytes": statistics.median(shared),
    }


async def _measure_branches(backend: MicroVmBackend, repeats: int) -> dict[str, float]:
    source = await backend.create(_SPEC)
    await source.exec(f"head -c {_DIRTY_BYTES} /dev/urandom > /tmp/dirty", _COMMAND_SECONDS)
    execs, pauses, whole = [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        await source.exec("true", _COMMAND_SECONDS)
        execs.append(time.perf_counter() - started)
        started = time.perf_counter()
        (child,) = await backend.fork(source)
        whole.append(time.perf_counter() - started)
        pauses.append(source.pause_seconds)
        await child.close()
    mebibytes = source.copied_bytes / 2**20
    await source.close()
    return {
        "exec_warm": _median_ms(execs),
        "branch_pause": _median_ms(pauses),
        "branch_pause_best": 1e3 * min(pauses),
        "branch_dirty_mebibytes": mebibytes,
        "branch_whole": _median_ms(whole),
    }


async def measure(
    repeats: int, accelerator: Accelerator | None = None, image_folder: Path | None = None
) -> dict[str, float]:
    """Figures in milliseconds but for those whose name says otherwise; None: KVM where it works."""
    folder = image_folder or load_settings().cache_directory / "microvm"
    backend = MicroVmBackend(folder, accelerator=accelerator)
    try:
        started = time.perf_counter()
        await (await backend.create(_SPEC)).close()
        figures = {"first_create_seconds": time.perf_counter() - started}
        if backend.templates.boots:
            figures["boot_processor_seconds"] = backend.templates.boots[0]
        figures.update(await _measure_forks(backend, repeats))
        figures.update(await _measure_branches(backend, max(3, repeats // 2)))
        figures["is_kvm"] = float(backend.templates.accelerator is Accelerator.KVM)
        figures["load"] = os.getloadavg()[0]
        return figures
    finally:
        await backend.close()


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--accelerator", choices=list(Accelerator), help="default: KVM or TCG")
    options = parser.parse_args()
    accelerator = Accelerator(options.accelerator) if options.accelerator else None
    try:
        figures = asyncio.run(measure(4 if options.quick else 20, accelerator))
    except SandboxError as error:
        raise SystemExit(f"no figures: {error}") from error
    for name, value in figures.items():
        target = f"  (target {TARGETS_MS[name]:.0f})" if name in TARGETS_MS else ""
        print(f"{name:>28} {value:9.2f}{target}")
    met = all(figures[name] <= target for name, target in TARGETS_MS.items())
    answer = {"name": "sandbox_microvm", "figures": figures, "targets": TARGETS_MS, "met": met}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
