"""Patches laid over files, by git in an empty folder: nothing of the project runs."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from ostinato.infra.platform.git import run_git


def apply_patch(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """The files after a unified diff with paths a/... and b/... ProblemError says where it does not fit. Only
    paths below the folder can change; git refuses others.
    """
    if not patch.strip():
        return dict(files)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        for path, content in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        folder.mkdir(exist_ok=True)
        written = Path(place) / "given.patch"
        written.write_text(patch if patch.endswith("\n") else f"{patch}\n")
        run_git(None, "init", "--quiet", "--template=", str(folder))
        run_git(folder, "apply", "--whitespace=nowarn", str(written))
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
            and not path.is_symlink()
            and path.relative_to(folder).parts[0] != ".git"
        }
