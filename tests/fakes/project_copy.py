"""A copy of the source tree in which a test may change code, and the command run from it."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ostinato
from tests.fakes.processes import COMMAND


class ProjectCopy:
    """A copy of the source tree whose command runs in the home that the environment names."""

    def __init__(self, root: Path, home: Path) -> None:
        self.package = root / "ostinato"
        self._home = home
        # what numba compiled goes along: its key is the time of the source, which a copy keeps
        ignored = shutil.ignore_patterns("*.pyc")
        shutil.copytree(Path(ostinato.__file__).parent, self.package, ignore=ignored)

    @contextmanager
    def changed(self, path: str, old: str, new: str) -> Iterator[None]:
        """One piece of text of a file is another one."""
        file = self.package / path
        text = file.read_text()
        assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times, wanted once"
        file.write_text(text.replace(old, new))
        yield
        file.write_text(text)

    def built_by_demo(self, *options: str) -> Counter[str]:
        """Kinds of what a run of the miniature chain built, counted by run directories."""
        before = self._run_directories()
        done = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, "demo", "--recipe", "miniature", *options],
            env={
                **os.environ,
                "PYTHONPATH": str(self.package.parent),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return Counter(name.split("-")[0] for name in self._run_directories() - before)

    def _run_directories(self) -> set[str]:
        return {path.name for path in self._home.glob("runs/*/*")}
