"""GPUs of this machine as `nvidia-smi` names them, for plans that are not told a chip."""

import subprocess

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.tasks.planning.inputs import chip_names

QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
QUERY_SECONDS = 30.0
# boards with slower memory and links than the SXM boards in inputs.toml
OTHER_BOARDS = frozenset({"pcie", "nvl"})


class MachineGpus(Record):
    """Equal GPUs of a known chip."""

    chip: str
    gpus: int


def find_gpus(options: str) -> MachineGpus:
    """The GPUs of this machine. ConfigError says why they are not known, and names the known chips and the
    `options` that give them instead.
    """
    wanted = f"wanted {options} with a chip of {chip_names()}"
    try:
        ran = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"no nvidia-smi on PATH, so the chip is unknown; {wanted}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi failed: {error}; {wanted}") from None
    if ran.returncode:
        said = (ran.stderr or ran.stdout).strip()
        raise ConfigError(f"nvidia-smi ended with {ran.returncode}: {said:.200}; {wanted}")
    names = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
    chips = {_chip_of(name) for name in names}
    if len(chips) != 1 or None in chips:
        raise ConfigError(f"nvidia-smi names the GPUs {sorted(set(names))}; {wanted}")
    return MachineGpus(chip=str(chips.pop()), gpus=len(names))


def _chip_of(name: str) -> str | None:
    """The chip in a name such as "NVIDIA H100 80GB HBM3". None: not in inputs.toml."""
    words = name.lower().split()
    known = [chip for chip in chip_names() if chip in words]
    return known[0] if known and not OTHER_BOARDS & {*words} else None
