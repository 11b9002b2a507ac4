"""The rate of this host's processor counter, which a guest's clock is read from.

A guest trusts the rate it is given: its clock, timers and time limits are wrong by the same factor.
"""

import os
import subprocess
from pathlib import Path

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.microvm.image import Image

# repeated measurements differ by far less; 10 kHz of 2 GHz are 0.02 s per hour
_ROUNDED_KHZ = 10
_MEASURE_SECONDS = 60.0


def read_boot_id() -> str:
    """The kernel's id of this boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def measure_ticks_khz(image: Image, folder: Path) -> int:
    """Rate of the counter in kHz. Kept in `folder` until the host restarts."""
    kept = folder / f"ticks-khz-{read_boot_id()}"
    if not kept.is_file():
        partial = kept.with_name(f"{kept.name}.partial.{os.getpid()}")
        partial.write_text(str(_measure(image.tick_rate)))
        partial.replace(kept)
    return int(kept.read_text())


def _measure(program: Path) -> int:
    answer = subprocess.run([program], capture_output=True, timeout=_MEASURE_SECONDS, text=True)
    if answer.returncode or not answer.stdout.strip().isdecimal() or not int(answer.stdout):
        raise SandboxError(
            f"{program} ended with {answer.returncode} and {answer.stdout!r}, wanted 0 and a "
            "number of kilohertz"
        )
    return round(int(answer.stdout) / _ROUNDED_KHZ) * _ROUNDED_KHZ
