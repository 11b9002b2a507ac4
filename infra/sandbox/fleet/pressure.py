"""What this machine feels now.

`read_pressure`: stall ratios (PSI, where the kernel has it), load, memory and disk in use. It
decides nothing.
"""

from pathlib import Path

import psutil

from ostinato.infra.sandbox.fleet.records import Pressure, Resources

_PRESSURE_FOLDER = Path("/proc/pressure")


def read_pressure(writable: Path) -> Pressure:
    """Pressure of the whole machine. Disk is that of the file system of `writable`."""
    num_cpus = psutil.cpu_count() or 1
    load_per_cpu = psutil.getloadavg()[0] / num_cpus
    memory = psutil.virtual_memory()
    return Pressure(
        cpu_stall_ratio=_stall_ratio("cpu"),
        memory_stall_ratio=_stall_ratio("memory"),
        disk_stall_ratio=_stall_ratio("io"),
        load_per_cpu=load_per_cpu,
        used=Resources(
            cpus=min(load_per_cpu, 1.0) * num_cpus,
            memory_bytes=memory.total - memory.available,
            disk_bytes=psutil.disk_usage(str(writable)).used,
        ),
    )


def _stall_ratio(resource: str) -> float | None:
    """Share of the last ten seconds in which some task waited for the resource."""
    try:
        lines = (_PRESSURE_FOLDER / resource).read_text().splitlines()
    except OSError:  # a kernel without PSI, or one that has it switched off
        return None
    for line in lines:
        kind, *fields = line.split()
        if kind == "some":
            values = dict(field.split("=") for field in fields)
            return float(values["avg10"]) / 100
    return None
