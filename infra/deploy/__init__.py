"""Files that bring Ostinato to machines of others: container, KubeRay, Slurm, work pools of Prefect. README.md lists them."""

import shutil
from pathlib import Path

__all__ = ["FOLDER", "copy_files"]

FOLDER = Path(__file__).parent


def copy_files(directory: Path) -> list[Path]:
    """The paths of the files, copied to a directory. Older copies there are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    sources = [path for path in sorted(FOLDER.iterdir()) if path.is_file() and path.suffix != ".py"]
    return [Path(shutil.copy(path, directory)) for path in sources]
