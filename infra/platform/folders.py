"""Folders as mappings: the content of each regular file by its path below."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path


def read_folder(
    folder: Path, *, left_out: Collection[str] = (), most_bytes: int | None = None
) -> dict[str, bytes]:
    """Regular files below a folder. Links, files and folders of the names `left_out`, and files of more
    than `most_bytes` are passed over.
    """
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_symlink() or not path.is_file() or not set(left_out).isdisjoint(inside.parts):
            continue
        if most_bytes is None or path.stat().st_size <= most_bytes:
            files[inside.as_posix()] = path.read_bytes()
    return files


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files below a folder, which is made with all that they need."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def is_below(path: str, roots: Iterable[str]) -> bool:
    """Whether a path is one of the roots or lies in one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)
