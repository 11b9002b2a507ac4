"""Patches laid over files, by git in an empty folder: nothing of the project runs."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ostinato.infra.platform.folders import read_folder, write_folder
from ostinato.infra.platform.git import run_git


def apply_patch(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """The files after a unified diff with paths a/... and b/... ProblemError says where it does not fit. Only
    paths below the folder can change; git refuses others.
    """
    if not patch.strip():
        return dict(files)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        write_folder(folder, files)
        written = Path(place) / "given.patch"
        written.write_text(patch if patch.endswith("\n") else f"{patch}\n")
        run_git(None, "init", "--quiet", "--template=", str(folder))
        run_git(folder, "apply", "--whitespace=nowarn", str(written))
        shutil.rmtree(folder / ".git")
        return read_folder(folder)
