"""Small files of a run: time used over all its processes, and what waits for what right now."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.infra.platform.cluster.workspace import replace_text

STATE_FILE = "run_state.json"
STATUS_FILE = "status.json"


class RunState:
    """Seconds used so far. Survives a kill up to the last finished step."""

    def __init__(self, path: Path, used_seconds: float) -> None:
        self._path = path
        self.used_seconds = used_seconds

    @classmethod
    def load(cls, directory: Path) -> "RunState":
        """The state of a workspace. Zero when it is new."""
        path = directory / STATE_FILE
        used = json.loads(path.read_bytes())["used_seconds"] if path.exists() else 0.0
        return cls(path, float(used))

    def save(self, used_seconds: float) -> None:
        """Replaces the file."""
        self.used_seconds = used_seconds
        replace_text(self._path, json.dumps({"used_seconds": used_seconds}))


class StatusFile:
    """State that `ostinato status` reads: parts that wait, for what, since when (seconds since the
    epoch).
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self._path = directory / STATUS_FILE
        self._run_id = run_id

    def write(self, phase: str, waits: Mapping[str, Mapping[str, Any]], **numbers: Any) -> None:
        """Replaces the file."""
        status = {
            "run": self._run_id,
            "phase": phase,
            "at": time.time(),
            "waits": waits,
            **numbers,
        }
        replace_text(self._path, json.dumps(status, indent=1))
