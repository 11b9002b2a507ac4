"""Free memory that glibc's allocator keeps.

Stages keep big blocks in the process (infra/platform/cluster/child.py), because fetching them from
the kernel for each step costs half of the processor time. The trainer's blocks fragment this
memory: their sizes vary with the prefixes that attempts of a microbatch share.
"""

import ctypes
from functools import cache

import psutil

_KEPT_SHARE = 0.25  # of the machine's memory


class _Usage(ctypes.Structure):
    """`struct mallinfo2` of malloc.h. Fields that are not used here are grouped."""

    _fields_ = [
        ("arena_to_hblks", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # bytes in blocks with a mapping of their own
        ("usmblks_to_fsmblks", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # bytes in use
        ("fordblks_to_keepcost", ctypes.c_size_t * 2),
    ]


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library if it is glibc 2.33 or newer, else None."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _Usage
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def free_memory_bytes() -> int:
    """Resident memory outside of blocks in use, including code of libraries. 0 without glibc's report."""
    library = _glibc()
    if library is None:
        return 0
    usage = library.mallinfo2()
    return max(0, psutil.Process().memory_info().rss - usage.uordblks - usage.hblkhd)


def return_free_memory(kept_bytes: int | None = None) -> None:
    """Returns free memory to the kernel if it exceeds `kept_bytes` (None: a quarter of the machine's)."""
    if kept_bytes is None:
        kept_bytes = int(psutil.virtual_memory().total * _KEPT_SHARE)
    library = _glibc()
    if library is not None and free_memory_bytes() > kept_bytes:
        library.malloc_trim(0)
