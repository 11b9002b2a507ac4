"""Load of this machine: stall ratios (PSI, where the kernel has it), memory and disk in use."""

import re
from pathlib import Path

import psutil

from ostinato.infra.sandbox.fleet.records import Pressure, Resources

_PRESSURE_FOLDER = Path("/proc/pressure")


def read_pressure(writable: Path) -> Pressure:
    """Pressure of the whole machine. Disk is that of the file system of `writable`."""
    memory = psutil.virtual_memory()
    return Pressure(
        stall_ratio=max(map(_stall_ratio, ("cpu", "memory", "io"))),
        memory_stall_ratio=_stall_ratio("memory"),
        load_per_cpu=psutil.getloadavg()[0] / (psutil.cpu_count() or 1),
        used=Resources(
            memory_bytes=memory.total - memory.available,
            disk_bytes=psutil.disk_usage(str(writable)).used,
        ),
    )


def _stall_ratio(resource: str) -> float:
    """Share of the last ten seconds in which some task waited for the resource."""
    try:
        text = (_PRESSURE_FOLDER / resource).read_text()
    except OSError:  # a kernel without PSI, or one that has it switched off
        return 0.0
    found = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1]) / 100
