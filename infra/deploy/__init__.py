"""Deployment files: container, KubeRay, Slurm, work pools of Prefect. README.md lists them."""

import shutil
from pathlib import Path

__all__ = ["FOLDER", "copy_files"]

FOLDER = Path(__file__).parent


def copy_files(directory: Path) -> list[Path]:
    """Copies the files to a directory, over older copies. Returns their paths there."""
    directory.mkdir(parents=True, exist_ok=True)
    sources = [path for path in sorted(FOLDER.iterdir()) if path.is_file() and path.suffix != ".py"]
    return [Path(shutil.copy(path, directory)) for path in sources]
