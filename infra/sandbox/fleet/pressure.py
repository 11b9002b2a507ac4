"""Load of this machine, and how many boxes it can hold."""

import psutil

# What is counted for a box when machines are filled. An agent's box mostly waits for the model; what it may use
# at most is its limits' to say, and the sum of those would leave machines empty.
_BOXES_PER_CORE = 36
_BYTES_PER_BOX = 64 << 20
_FILLED_SHARE = 0.9


def read_pressure() -> float:
    """Tasks that run or wait per core, plus the share of memory in use. Near 0 for an idle machine."""
    return (
        psutil.getloadavg()[0] / (psutil.cpu_count() or 1) + psutil.virtual_memory().percent / 100
    )


def count_room() -> int:
    """Boxes that this machine can hold together, at least one."""
    memory = psutil.virtual_memory().total * _FILLED_SHARE / _BYTES_PER_BOX
    return max(1, int(min((psutil.cpu_count() or 1) * _BOXES_PER_CORE, memory)))
