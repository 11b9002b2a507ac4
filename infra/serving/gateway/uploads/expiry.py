"""Folder and expiry of a home's uploads. Imports no server, since `ostinato gc` uses this module too."""

from collections.abc import Iterator
from pathlib import Path

from ostinato.infra.platform.settings import Settings

MANIFEST = "upload.json"
HOUR_SECONDS = 3_600.0
LEFTOVER_SECONDS = HOUR_SECONDS  # age at which files of unfinished uploads are removed


def uploads_folder(settings: Settings) -> Path:
    """Folder of a home that holds one folder per tenant."""
    return settings.home / "uploads"


def last_used(upload: Path) -> float:
    """When an upload was created or last used, in seconds since 1970. 0 when it is gone."""
    try:
        return (upload / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def expired(folder: Path, hours: float, now: float) -> Iterator[Path]:
    """Uploads that were not used for `hours`, and old files of unfinished uploads."""
    for path in folder.glob("*/*"):
        used = last_used(path)
        try:
            at, kept = (
                (used, hours * HOUR_SECONDS) if used else (path.stat().st_mtime, LEFTOVER_SECONDS)
            )
        except FileNotFoundError:
            continue
        if at + kept < now:
            yield path
