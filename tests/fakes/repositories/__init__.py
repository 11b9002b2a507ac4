"""Two tiny repositories with tests, for everything that needs one without a network.

`wordkit` has plain functions and tests beside the package; `ledgerkit` has classes, decorators, state made at import and
tests inside the package. Prepared repositories and source archives of them.
"""

import asyncio
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.problems.config import RepositorySource
from ostinato.tasks.problems.proving.baseline import Baseline
from ostinato.tasks.problems.selection import Sources

_FOLDER = Path(__file__).parent
WORDKIT = RepositorySource(
    name="wordkit",
    version="1.0",
    package_paths=("wordkit",),
    test_paths=("tests",),
    mutated_paths=("wordkit/counting.py", "wordkit/shaping.py"),
)
LEDGERKIT = RepositorySource(
    name="ledgerkit",
    version="2.1",
    package_paths=("ledgerkit",),
    test_paths=("ledgerkit/tests",),
    mutated_paths=("ledgerkit/money.py", "ledgerkit/book.py"),
)


def open_repository(source: RepositorySource) -> PreparedRepository:
    """The repository as it lies in this folder."""
    return PreparedRepository.from_directory(
        source.name, _FOLDER / source.name, source.package_paths, source.test_paths
    )


@contextmanager
def running_server(
    runner: asyncio.Runner, repository: PreparedRepository
) -> Iterator[TestServer]:
    """A test server on a runner's loop."""
    server = TestServer(repository)
    runner.run(server.start())
    yield server
    runner.run(server.close())


def cover_everything(sources: Sources) -> Baseline:
    """A baseline in which one test calls every function."""
    every = [item.call_key for found in sources.definitions.values() for item in found]
    return Baseline(
        repository=sources.repository.name,
        fingerprint=sources.repository.fingerprint,
        tests=("tests/test_all.py::test_all",),
        call_bits=(1,),
        num_collected=1,
        num_unstable=0,
        num_not_passing=0,
        callers={f"{path}:{line}:{name}": (0,) for path, line, name in every},
    )


# tables of a recipe: the one demonstrates, the other is held out
TWO_PACKAGES = """
[[problems.repositories]]
name = "wordkit"
version = "1.0"
package_paths = ["wordkit"]
test_paths = ["tests"]
mutated_paths = ["wordkit/counting.py", "wordkit/shaping.py"]
split = "demonstration"

[[problems.repositories]]
name = "ledgerkit"
version = "2.1"
package_paths = ["ledgerkit"]
test_paths = ["ledgerkit/tests"]
mutated_paths = ["ledgerkit/money.py"]
split = "held_out"
"""


def write_archives(cache: Path) -> None:
    """Those of both packages."""
    for source in (WORDKIT, LEDGERKIT):
        write_archive(source, cache)


def write_archive(
    source: RepositorySource,
    cache: Path,
    named: RepositorySource | None = None,
    parent: Path = _FOLDER,
) -> Path:
    """Put a source archive, under another package's name if given, where the stage looks first."""
    label = named or source
    name = f"{label.name}-{label.version}"
    folder = cache / name
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{name}.tar.gz"
    if archive.exists():
        return archive
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted((parent / source.name).rglob("*.py")):
            tar.add(path, f"{name}/{path.relative_to(parent / source.name).as_posix()}")
    return archive
