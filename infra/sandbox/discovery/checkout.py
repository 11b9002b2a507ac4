"""A repository as its owner has it, for a chat or an upload: product code, tests and import roots. No file is moved, and
no code of it runs. Problems are made of the same metadata, rules and layouts (tasks/problems/discovery).
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from pydantic import Field

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.discovery.collection import Rules, write_rules
from ostinato.infra.sandbox.discovery.layout import IMPORT_ROOTS, NO_PRODUCT, TEST_PATTERNS, is_test
from ostinato.infra.sandbox.discovery.metadata import read_metadata
from ostinato.infra.sandbox.inside.sources import RULES_FILE

TEST_FOLDERS = frozenset({"tests", "test", "unittests", "unit_tests"})
NO_PACKAGE = frozenset({"docs", "doc", "examples", "scripts", "benchmarks"})
PROJECT_FILES = frozenset({"pyproject.toml", "setup.py", "setup.cfg"})


class Checkout(Record):
    """Layout of a repository."""

    package_paths: tuple[str, ...]
    test_paths: tuple[str, ...]
    import_roots: tuple[str, ...] = Field(description="folders on the import path besides the top")
    generated_files: dict[str, str] = Field(
        default={},
        description="content by path: the pytest.ini with its rules of collection and import roots; empty if pytest's "
        "defaults find the tests",
    )


def describe_checkout(files: Mapping[str, bytes]) -> Checkout:
    """The layout of a repository with these files. Metadata that cannot be read is ignored."""
    rules, stated = Rules(), ()
    try:
        metadata = read_metadata(files, "repository")
        rules, stated = metadata.rules, metadata.import_roots
    except ProblemError:  # the user may be about to mend it
        pass
    roots = tuple(dict.fromkeys((*rules.pythonpath, *stated, *_import_roots(files))))
    packages, tests = _paths(files, rules.python_files)
    generated = write_rules(rules.model_copy(update={"pythonpath": roots}), "")
    if own := files.get(RULES_FILE):  # the owner's file stays, with the import roots that it lacks
        generated = {} if not roots or rules.pythonpath else {RULES_FILE: _with_roots(own, roots)}
    return Checkout(
        package_paths=packages, test_paths=tests, import_roots=roots, generated_files=generated
    )


def _with_roots(own: bytes, roots: Iterable[str]) -> str:
    """The text of a pytest.ini with a line for the import path."""
    head, section, rest = own.decode(errors="replace").partition("[pytest]")
    return f"{head}{section or '[pytest]'}\npythonpath = {shlex.join(roots)}{rest}"


def _import_roots(files: Iterable[str]) -> Iterator[str]:
    """Folders of a usual name that hold packages, at the top and in each project of a monorepo, and such projects. In `src`
    modules count too.
    """
    paths = [PurePosixPath(path) for path in files]
    packages = {path.parent for path in paths if path.name == "__init__.py"}
    with_package = {package.parent for package in packages} - packages
    with_code = {folder for path in paths if path.suffix == ".py" for folder in path.parents}
    top = PurePosixPath()
    projects = {path.parent for path in paths if path.name in PROJECT_FILES} | {top}
    for project in sorted(projects):
        if NO_PRODUCT & {*project.parts}:
            continue
        for name in IMPORT_ROOTS:
            root = project / name
            if root in with_package or (name == "src" and root in with_code - packages):
                yield str(root)
        if project != top and project in with_package:
            yield str(project)


def _paths(
    files: Iterable[str], patterns: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of code and of tests. Tests are folders of a usual name, conftest.py and files of a test's name. Other
    Python is code, except setup.py and folders in NO_PACKAGE.
    """
    tests: set[str] = set()
    packages: set[str] = set()
    for path in files:
        pure = PurePosixPath(path)
        if pure.suffix != ".py":
            continue
        folders = pure.parts[:-1]
        depth = next((i for i, part in enumerate(folders) if part in TEST_FOLDERS), None)
        if depth is not None:
            tests.add("/".join(folders[: depth + 1]))
        elif pure.name == "conftest.py" or is_test(path, (*TEST_PATTERNS, *patterns)):
            tests.add(path)
        elif not folders:
            if pure.name != "setup.py":
                packages.add(path)
        elif folders[0] not in NO_PACKAGE:
            packages.add("/".join(folders[: 2 if folders[0] == "src" else 1]))
    return tuple(sorted(packages)), tuple(sorted(tests))
