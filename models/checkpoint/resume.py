"""The one file from which an interrupted training run continues.

What the state means is the training loop's.
"""

import os
import uuid
from pathlib import Path
from typing import Any

import torch

from ostinato.models.checkpoint.full_disk import naming_full_disk


def save_resume_state(path: Path, state: dict[str, Any]) -> None:
    """Replaces the file. A reader or a crash sees the old state or the new."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with naming_full_disk(path), temporary.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        with naming_full_disk(path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_resume_state(path: Path) -> dict[str, Any] | None:
    """Reads the file. None when there is none."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
