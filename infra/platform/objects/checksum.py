"""The checksum of everything stored: xxh3-128 as 32 hex digits. It guards against damage, not
against malice.
"""

import hashlib
from pathlib import Path

import xxhash


def checksum_bytes(data: bytes | memoryview) -> str:
    """Checksum of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
