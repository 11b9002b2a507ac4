"""Log lines as key=value.

It owns no logger: each module has `logging.getLogger(__name__)`.
"""

import logging
import sys
from pathlib import Path

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
        "httpcore",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)
