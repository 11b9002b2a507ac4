"""What an object store backend must do. Backends raise OSError; `ObjectStore` makes it a
StorageError.
"""

from pathlib import Path
from typing import Protocol


class ObjectBackend(Protocol):
    """Operations on whole objects. Keys are already checked."""

    def write(self, key: str, data: bytes) -> None:
        """Store atomically: a reader sees the old object or the whole new one."""
        ...

    def write_new(self, key: str, data: bytes) -> bool:
        """Store only if the key is free. False when it is taken."""
        ...

    def upload(self, key: str, path: Path) -> None:
        """Store a file atomically."""
        ...

    def read(self, key: str) -> bytes:
        """The whole object. FileNotFoundError if there is none."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Copy the object to `path`, whose folder exists."""
        ...

    def exists(self, key: str) -> bool:
        """Whether the object is there now, not as of some earlier listing."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""
        ...

    def remove(self, key: str) -> None:
        """Delete. No error if there is none."""
        ...
