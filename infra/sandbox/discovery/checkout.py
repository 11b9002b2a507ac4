"""A repository as its owner has it, for a chat or an upload: product code, tests and import roots. No file is moved, and
no code of it runs. Problems are made of the same metadata, rules and tests (tasks/problems/discovery).
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from pydantic import Field

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.discovery.collection import Rules, write_rules
from ostinato.infra.sandbox.discovery.layout import (
    IMPORT_ROOTS,
    NO_PRODUCT,
    TEST_FOLDERS,
    TEST_PATTERNS,
    find_tests,
    has_parent_in,
    is_test,
)
from ostinato.infra.sandbox.discovery.metadata import read_metadata
from ostinato.infra.sandbox.inside.sources import RULES_FILE

CONFTEST = "conftest.py"
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
    python = [path for path in files if path.endswith(".py")]
    patterns = (*TEST_PATTERNS, *rules.python_files)
    code = _code(python, patterns)
    tests = {*find_tests(python, code, patterns, rules.testpaths)}
    fixtures = {path for path in python if PurePosixPath(path).name == CONFTEST}
    fixtures -= {path for path in fixtures if has_parent_in(path, tests)}
    generated = write_rules(rules.model_copy(update={"pythonpath": roots}), "")
    if own := files.get(RULES_FILE):  # the owner's file stays, with the import roots that it lacks
        generated = {} if not roots or rules.pythonpath else {RULES_FILE: _with_roots(own, roots)}
    return Checkout(
        package_paths=tuple(code),
        test_paths=tuple(sorted(tests | fixtures)),
        import_roots=roots,
        generated_files=generated,
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


def _code(files: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Top-level modules and folders of code, in `src` one level deeper. Python is code unless it is a test, below a folder
    of tests, a setup.py at the top, or below one of NO_PACKAGE.
    """
    found: set[str] = set()
    for path in files:
        pure = PurePosixPath(path)
        folders = pure.parts[:-1]
        if TEST_FOLDERS & {*folders[:1]} or is_test(path, patterns) or pure.name == CONFTEST:
            continue
        if not folders and pure.name != "setup.py":
            found.add(path)
        elif folders and folders[0] not in NO_PACKAGE:
            found.add("/".join(folders[: 2 if folders[0] == "src" else 1]))
    return sorted(found)
