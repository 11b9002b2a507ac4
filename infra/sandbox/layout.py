"""Which paths of a repository hold product code and which hold tests, guessed from the names of its files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

TEST_FOLDERS = frozenset({"tests", "test"})
NO_PACKAGE = frozenset({"docs", "doc", "examples", "scripts", "benchmarks"})


@dataclass(frozen=True, slots=True)
class Layout:
    """Product and test paths of the repository."""

    package_paths: tuple[str, ...]
    test_paths: tuple[str, ...]


def guess_layout(paths: Iterable[str]) -> Layout:
    """Tests are folders named tests or test and files named test_*.py. Code is the other Python."""
    tests: set[str] = set()
    packages: set[str] = set()
    for path in paths:
        pure = PurePosixPath(path)
        if pure.suffix != ".py":
            continue
        folders = pure.parts[:-1]
        depth = next((i for i, part in enumerate(folders) if part in TEST_FOLDERS), None)
        if depth is not None:
            tests.add("/".join(folders[: depth + 1]))
        elif pure.name.startswith("test_") or pure.name == "conftest.py":
            tests.add(path)
        elif not folders:
            if pure.name != "setup.py":
                packages.add(path)
        elif folders[0] not in NO_PACKAGE:
            packages.add("/".join(folders[: 2 if folders[0] == "src" else 1]))
    return Layout(tuple(sorted(packages)), tuple(sorted(tests)))
