"""Reports a full disk as one kind of error, whichever library met it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_BYTES = 64 * 1024  # less free space counts as full: torch's C++ writer gives no reason


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turns a failure for lack of disk space into an OSError (ENOSPC) that names `path`."""
    try:
        yield
    except Exception as error:
        free_bytes = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
        if not _says_full(error) and free_bytes > _FULL_BYTES:
            raise
        text = f"{os.strerror(errno.ENOSPC)}, {free_bytes} bytes free; free space, then run again"
        raise OSError(errno.ENOSPC, text, str(path)) from error


def _says_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
