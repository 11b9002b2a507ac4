"""Processes inside a box: protection of the server, waiting times.

Standard library only: this file runs inside the box.
"""

import ctypes
import signal

_PR_SET_DUMPABLE = 4


def protect_server() -> None:
    """No other process of the box may read this one's memory or descriptors, or interrupt it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Process 1 receives from inside its box only signals it handles, so the default action is the
    # safe one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def read_waited_seconds(process_id: int) -> float:
    """Time a process was ready to run while others had the CPUs. 0 where the kernel does not say."""
    try:
        with open(f"/proc/{process_id}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
