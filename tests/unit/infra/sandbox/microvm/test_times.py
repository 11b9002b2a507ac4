"""Times of files that were there stay when others are laid over them, for every name."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.microvm.backend import MicroVmSandbox
from ostinato.infra.sandbox.protocol import ExecResult


class FolderSandbox(MicroVmSandbox):
    """A sandbox whose machine is a folder of this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def exec(self, command: str, *_, **__) -> ExecResult:
        done = subprocess.run(command, shell=True, cwd=self.folder, capture_output=True)
        return ExecResult(
            exit_code=done.returncode,
            output=done.stdout,
            truncated=False,
            timed_out=False,
            wall_seconds=0.0,
        )

    async def write_files(self, files: Mapping[str, bytes | None]) -> dict[str, SandboxError]:
        for path, content in files.items():
            (self.folder / path).write_bytes(content or b"")
        return {}


async def test_times_stay_whatever_the_names_begin_with(tmp_path):
    names = ("-x", "--help", "plain", "with space")
    for name in names:
        (tmp_path / name).touch()
    for place in (*(tmp_path / name for name in names), tmp_path):
        os.utime(place, (1e9, 1e9))
    await FolderSandbox(tmp_path).apply_files(dict.fromkeys((*names, "-new"), b"changed"))
    for place in (*(tmp_path / name for name in names), tmp_path):
        assert place.stat().st_mtime == 1e9, place
