"""Rows of the disk, the object store and the uploads of weight versions in it."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil

from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds, first_line
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.weights.manifest import CHAINS, MANIFEST, parse_file_key


def disk_row(settings: Settings) -> StatusRow:
    """Room on the home's disk."""
    place = _present(settings.home)
    free = psutil.disk_usage(str(place)).free
    seen = f"{free / 2**30:.1f} GiB free"
    if free >= settings.minimum_free_disk_bytes:
        return StatusRow(part="disk", state="up", progress=seen)
    wanted = f"{settings.minimum_free_disk_bytes / 2**30:.1f}"
    cause = f"{seen} at {place}, wanted {wanted}: `ostinato gc`, or a larger disk by OSTINATO_HOME"
    return StatusRow(
        part="disk", state="full", waits_for="room", fault=Fault.FULL_DISK, cause=cause
    )


def store_row(settings: Settings, thresholds: Thresholds) -> StatusRow:
    """Whether the object store answers, and how fast."""
    refused = _refused_folder(settings.object_store_url)
    if refused:
        return _unusable(refused)
    began = time.monotonic()
    try:
        open_object_store(settings).exists("status")
    except OstinatoError as error:
        return _unusable(first_line(error))
    seconds = time.monotonic() - began
    if seconds > thresholds.slow:
        return slow_store(f"an answer took {seconds:.1f} s: its network or disk is slow")
    return StatusRow(part="store", state="up")


def slow_store(cause: str) -> StatusRow:
    """Row of a store that answers late, or not at all."""
    return StatusRow(part="store", state="slow", fault=Fault.SLOW_STORE, cause=cause)


def upload_rows(objects: ObjectStore, now: float, thresholds: Thresholds) -> Iterator[StatusRow]:
    """Weight versions newer than their chain's last committed one, to which nothing was added for a
    while. A version exists from its manifest on, which is written last.
    """
    parts: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for key, changed_at in objects.changed_at(CHAINS).items():
        found = parse_file_key(key)
        if found is not None:
            chain, version, name = found
            parts[chain, version][name] = changed_at
    committed: dict[str, int] = defaultdict(lambda: -1)
    for (chain, version), names in parts.items():
        if MANIFEST in names:
            committed[chain] = max(committed[chain], version)
    for (chain, version), names in sorted(parts.items()):
        since = max(names.values())
        if version <= committed[chain] or now - since < thresholds.upload:
            continue
        cause = (
            f"{len(names)} payloads lie in the store without its manifest: its publisher hangs, or "
            "was killed and has not resumed"
        )
        yield StatusRow(
            part=f"{chain} version {version}",
            state="half uploaded",
            waits_for="its manifest",
            since=since,
            fault=Fault.WEDGED_UPLOAD,
            cause=cause,
        )


def _refused_folder(url: str) -> str:
    """Why a folder cannot be a store. Empty when it can, or when the store is no folder."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return ""
    place = _present(Path(unquote(parts.path)))
    if not place.is_dir():
        return f"{place} is a file, wanted a folder; check OSTINATO_OBJECT_STORE_URL"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} may not be written, wanted a folder that may; see its owner"
    return ""


def _present(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _unusable(cause: str) -> StatusRow:
    return StatusRow(part="store", state="failing", fault=Fault.UNUSABLE_STORE, cause=cause)
