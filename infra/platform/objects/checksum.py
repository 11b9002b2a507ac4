"""The checksum of everything stored: xxh3-128 as 32 hex digits. It guards against damage, not
against malice.
"""

from pathlib import Path

import xxhash

_CHUNK_BYTES = 4 * 2**20


def checksum_bytes(data: bytes | memoryview) -> str:
    """Checksum of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
