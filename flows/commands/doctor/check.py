"""A line of the doctor."""

import subprocess
from collections.abc import Callable

from pydantic import Field

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.record import Record


class Check(Record):
    """Result of one check of this machine."""

    name: str
    ok: bool
    detail: str = Field(description="what was seen; when not ok, also what was wanted")
    fix: str = Field(default="", description="what to do; empty when ok")


def compare(name: str, ok: bool, seen: str, wanted: str, fix: str) -> Check:
    """A check of one number or name."""
    if ok:
        return Check(name=name, ok=True, detail=seen)
    return Check(name=name, ok=False, detail=f"{seen}, wanted {wanted}", fix=fix)


def attempt(name: str, action: Callable[[], str], fix: str) -> Check:
    """A check that runs `action`: what it returns, or its error, is the detail."""
    try:
        return Check(name=name, ok=True, detail=action())
    except (OstinatoError, OSError, subprocess.SubprocessError) as error:
        return Check(name=name, ok=False, detail=str(error), fix=fix)


def gigabytes(size_bytes: float) -> str:
    """A size in GiB."""
    return f"{size_bytes / 2**30:.1f} GiB"
