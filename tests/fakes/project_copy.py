"""The command of an installation, and a copy of the source tree in which a test may change code."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.architecture.source import PACKAGES, ROOT
from tests.fakes.processes import COMMAND


def copy_package(target: Path) -> None:
    """Copies what a wheel of the project holds to `target`, a folder called `ostinato`."""
    # what numba compiled goes along: its key is the time of the source, which a copy keeps
    ignored = shutil.ignore_patterns("*.pyc")
    target.mkdir(parents=True)
    for name in ("__init__.py", "prefect.yaml"):
        shutil.copy2(ROOT / name, target)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, target / name, ignore=ignored)


def times_of_results(home: Path) -> dict[Path, int]:
    """When each finished stage of a home wrote its result."""
    return {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}


class Installation:
    """The `ostinato` command of one installation, in the home that the environment names."""

    def __init__(
        self,
        home: Path,
        folder: Path,
        command: Sequence[str] = (sys.executable, "-P", "-c", COMMAND),
        **environment: str,
    ) -> None:
        """`folder` is where it is called; it leaves nothing there."""
        self._home = home
        self._folder = folder
        self._command = command
        self._environment = environment

    def run(self, *arguments: str) -> None:
        """Runs the command to its end; AssertionError with what it said when it fails."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=self._folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert not list(self._folder.iterdir())

    def built_by_demo(self, *options: str) -> Counter[str]:
        """Kinds of what a run of the miniature chain built, counted by run directories."""
        before = self._run_directories()
        self.run("demo", "--recipe", "miniature", *options)
        return Counter(name.split("-")[0] for name in self._run_directories() - before)

    def _run_directories(self) -> set[str]:
        return {path.name for path in self._home.glob("runs/*/*")}


class ProjectCopy(Installation):
    """A copy of the source tree, and its command."""

    def __init__(self, root: Path, home: Path) -> None:
        self.package = root / "ostinato"
        copy_package(self.package)
        elsewhere = root / "elsewhere"
        elsewhere.mkdir()
        super().__init__(home, elsewhere, PYTHONPATH=str(root))

    @contextmanager
    def changed(self, path: str, old: str, new: str) -> Iterator[None]:
        """One piece of text of a file is another one."""
        file = self.package / path
        text = file.read_text()
        assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times, wanted once"
        file.write_text(text.replace(old, new))
        try:
            yield
        finally:
            file.write_text(text)
