"""Log lines as key=value, and metrics of a long computation: one JSON line per step, readable during the computation
and after a kill.
"""

import contextlib
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import IO, Any

from ostinato.infra.platform.record import finite

_TAIL_LINES = 30
_TAIL_BYTES = 64 * 1024
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def fields(**values: object) -> str:
    """`key=value` pairs in the order given. A value with blanks is quoted."""
    parts = []
    for name, value in values.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        parts.append(f"{name}={text!r}" if " " in text or not text else f"{name}={text}")
    return " ".join(parts)


def log_tail(path: Path) -> str:
    """The last lines of a log, to end an error message with. Empty without a log."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return f"\nlast lines of {path}:\n" + "\n".join(f"  {line}" for line in lines)


def configure_logging() -> None:
    """Sends all logs of this process to stderr. Called once, at entry."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=_FORMAT, force=True)
    for noisy in (
        "botocore",
        "aiobotocore",
        "asyncio",
        "fsspec",
        "s3fs",
        "urllib3",
        "alembic",
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)


_NO_JSON = ("nan", "inf", "-inf")  # as `finite` writes them


class MetricsLog:
    """Append-only writer of metrics as JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def append(self, step: float, values: dict[str, float | int | str]) -> None:
        if self._file is None:
            self._file = open_lines(self.path)
        line = json.dumps(finite({"step": step, **values}), separators=(",", ":"))
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. A later append opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def open_lines(path: Path) -> IO[bytes]:
    """A file of lines to append to. Ends a partial last line, which a killed writer left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    if file.tell() > 0:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, empty without a file. A partial line of a killed writer is left out."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def read_metrics(path: Path) -> list[dict[str, float | int | str]]:
    """All lines in step order, with NaN and infinities, which JSON lacks, as floats again. Of a step that was
    repeated after a resume, only the last run is included.
    """
    rows: list[dict[str, float | int | str]] = []
    for row in read_lines(path):
        while rows and float(rows[-1]["step"]) >= float(row["step"]):
            rows.pop()
        rows.append(_with_floats(row))
    return rows


def _with_floats(row: dict[str, Any]) -> dict[str, float | int | str]:
    return {name: float(it) if it in _NO_JSON else it for name, it in row.items()}


class GrowingMetrics:
    """A file of metrics that is read while it grows. Remembers the place of each step's line, so that a read parses
    only new lines and those that it returns. A file that was shortened or replaced is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def thinned(self, max_rows: int) -> list[dict[str, float | int | str]]:
        """At most so many of the rows of `read_metrics`, evenly spread and including the last one."""
        with self._lock, contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            self._read_new(file)
            every = -(-len(self._lines) // max_rows) or 1
            descriptor = file.fileno()
            return [
                _with_floats(json.loads(os.pread(descriptor, size, start)))
                for _, start, size in self._lines[::-1][::every][::-1]
            ]
        return []

    def _forget(self) -> None:
        self._lines: list[tuple[float, int, int]] = []  # step, first byte, number of bytes
        self._file: tuple[int, int] = (0, 0)  # device and inode
        self._end, self._last_line = 0, b""

    def _read_new(self, file: IO[bytes]) -> None:
        status = os.fstat(file.fileno())
        file.seek(self._end - len(self._last_line))
        same = self._file == (status.st_dev, status.st_ino)
        if not same or file.read(len(self._last_line)) != self._last_line:
            self._forget()
        self._file = (status.st_dev, status.st_ino)
        file.seek(self._end)
        for line in file:
            try:
                step = float(json.loads(line)["step"])
            except ValueError:
                if not line.endswith(b"\n"):
                    break  # still being written
            else:
                while self._lines and self._lines[-1][0] >= step:
                    self._lines.pop()
                self._lines.append((step, self._end, len(line)))
            self._end += len(line)
            self._last_line = line
