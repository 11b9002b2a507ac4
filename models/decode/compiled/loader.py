"""Imports compiled decoding on demand: the import compiles it, or loads numba's cache."""

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.models.decode.cache import SlotCache
from ostinato.models.spec import ModelSpec

if TYPE_CHECKING:
    from ostinato.models.decode.compiled.native import NativeTrunk


def load_native_trunk(spec: ModelSpec, cache: SlotCache, rows: int) -> "NativeTrunk":
    """Compiled loops for a model's shape. `rows` is the maximum that one step feeds."""
    drop_stale_code(Path(__file__).parent)
    from ostinato.models.decode.compiled.native import NativeTrunk  # noqa: PLC0415 - importing it compiles

    return NativeTrunk(spec, cache, rows)


def drop_stale_code(folder: Path) -> None:
    """Deletes numba's compiled code if any file of the folder has changed since it was compiled.

    numba checks only the file of a function, and misses changes of functions that it calls in other
    files: https://numba.readthedocs.io/en/stable/developer/caching.html
    """
    sources = sorted(folder.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    cache = folder / "__pycache__"
    stamp = cache / "sources.sha256"
    with contextlib.suppress(OSError):  # a read-only folder holds no compiled code either
        if stamp.exists() and stamp.read_text() == digest:
            return
        for compiled in cache.glob("*.nb[ci]"):
            compiled.unlink(missing_ok=True)
        cache.mkdir(exist_ok=True)
        stamp.write_text(digest)
