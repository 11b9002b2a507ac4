"""Layout of a project that nobody described: import root, product code, tests, and files that tests read."""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath

from pydantic import Field

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import is_below
from ostinato.infra.platform.record import Record
from ostinato.tasks.problems.repositories import strip_prefix

IMPORT_ROOTS = ("src", "lib", "source", "python")
TEST_FOLDERS = frozenset(("tests", "test", "testing", "unittests", "unit_tests"))
NO_PRODUCT = TEST_FOLDERS | frozenset(
    {
        "docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "tools", "scripts", "build", "dist",
        "tasks", "ci", "fuzz", "fuzzing", "venv", "node_modules", "requirements",
    }
)  # fmt: skip
NO_MODULES = frozenset(("setup.py", "conftest.py", "noxfile.py", "tasks.py", "versioneer.py"))
USUAL_PATTERNS = ("test_*.py", "*_test.py")  # that the test runner looks for
TEST_PATTERNS = (*USUAL_PATTERNS, "tests.py")
TEST_SCRIPT = "test.py"  # at the top, where no file has a usual name
_WORD = re.compile(r"[A-Za-z0-9_.\-]+")


class Layout(Record):
    """Paths as they lie on the import path, once files below `stripped_prefix` have moved up."""

    stripped_prefix: str
    package_paths: tuple[str, ...]
    test_paths: tuple[str, ...]
    kept_paths: tuple[str, ...] = Field(description="other files that tests name")


def find_layout(
    files: Mapping[str, bytes],
    name: str,
    *,
    top_level: Collection[str] = (),
    test_patterns: Iterable[str] = (),
) -> Layout:
    """Layout of the project `name`.

    `top_level`: import names that its metadata states. `test_patterns`: of test files, beside the
    usual ones. ProblemError says what was looked for when code or tests are not found.
    """
    wanted = {_import_name(item) for item in top_level} or {_import_name(name)}
    root = _import_root(files, wanted)
    moved = strip_prefix(files, root) if root else dict(files)
    packages = _packages(moved, wanted, from_root=bool(root))
    if not packages:
        raise ProblemError(
            f"{name}: no package or module of that name, wanted NAME/__init__.py or NAME.py at the "
            f"top or below one of {list(IMPORT_ROOTS)}; top level holds {sorted(_tops(files))[:20]}"
        )
    tests = _tests(moved, packages, (*TEST_PATTERNS, *test_patterns))
    if not tests and TEST_SCRIPT in moved:
        tests, packages = (TEST_SCRIPT,), tuple(path for path in packages if path != TEST_SCRIPT)
    if not tests:
        raise ProblemError(
            f"{name}: no test file ({', '.join((*TEST_PATTERNS, TEST_SCRIPT))}) outside examples and docs; a source "
            "distribution may leave its tests out: take a git repository instead"
        )
    return Layout(
        stripped_prefix=root,
        package_paths=packages,
        test_paths=tests,
        kept_paths=_kept(moved, packages, tests),
    )


def _import_name(text: str) -> str:
    return re.sub(r"[-_.]+", "_", text).lower()


def _tops(files: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in files}


def _import_root(files: Mapping[str, bytes], wanted: Collection[str]) -> str:
    """The folder that is on the import path: where a package of a wanted name lies, at the top first."""
    for root in ("", *IMPORT_ROOTS):
        moved = {
            path.removeprefix(f"{root}/") for path in files if not root or is_below(path, (root,))
        }
        if any(_import_name(top.removesuffix(".py")) in wanted for top in _code_tops(moved)):
            return root
    for root in IMPORT_ROOTS:
        if any(path.startswith(f"{root}/") and path.endswith(".py") for path in files):
            return root
    return ""


def _code_tops(paths: Iterable[str]) -> set[str]:
    """Modules and folders with modules."""
    return {path.partition("/")[0] for path in paths if path.endswith(".py")}


def _packages(
    files: Mapping[str, bytes], wanted: Collection[str], *, from_root: bool
) -> tuple[str, ...]:
    tops = sorted(top for top in _code_tops(files) if top not in NO_MODULES and top[0] not in "._")
    named = [top for top in tops if _import_name(top.removesuffix(".py")) in wanted]
    others = [top for top in tops if _is_product(top, files, from_root=from_root)]
    return tuple(dict.fromkeys((*named, *others))) if from_root or not named else tuple(named)


def _is_product(top: str, files: Mapping[str, bytes], *, from_root: bool) -> bool:
    if top in NO_PRODUCT or _is_test(top, TEST_PATTERNS):
        return False
    # beside code at the top lie scripts of the project itself; below src everything is meant to be imported
    return from_root or top.endswith(".py") or f"{top}/__init__.py" in files


def _is_test(path: str, patterns: Iterable[str]) -> bool:
    name = PurePosixPath(path).name
    return any(fnmatch(name, pattern) or fnmatch(path, pattern) for pattern in patterns)


def _tests(
    files: Mapping[str, bytes], packages: Collection[str], patterns: Collection[str]
) -> tuple[str, ...]:
    """Outermost folders of tests, and test files that lie among product code."""
    found: set[str] = set()
    for path in files:
        if not path.endswith(".py") or not _is_test(path, patterns):
            continue
        folders = PurePosixPath(path).parts[:-1]
        if any(folder[0] == "." or folder in NO_PRODUCT - TEST_FOLDERS for folder in folders):
            continue
        above = [n for n, folder in enumerate(folders) if folder in TEST_FOLDERS]
        # a product folder called `testing` holds helpers for others, as numpy's: only its test files are tests
        inside = bool(above) and not (is_below(path, packages) and folders[above[0]] == "testing")
        found.add("/".join(folders[: above[0] + 1]) if inside else path)
    usual = set(USUAL_PATTERNS)
    odd = [
        p
        for p in files
        if p.endswith(".py") and _is_test(p, set(patterns) - usual) and not _is_test(p, usual)
    ]
    folders = {path for path in found if not path.endswith(".py")}
    # the runner collects a file of an unusual name only when it is named
    found |= {path for path in odd if is_below(path, folders)}
    return tuple(sorted(found))


def _kept(
    files: Mapping[str, bytes], packages: Collection[str], tests: Collection[str]
) -> tuple[str, ...]:
    """Entries of the top level that tests name, in an import or a path, and a conftest.py there."""
    texts = [
        content for path, content in files.items() if is_below(path, tests) and path.endswith(".py")
    ]
    texts.append(files.get("conftest.py", b""))
    words = {word for text in texts for word in _WORD.findall(text.decode(errors="replace"))}
    tops = {top for top in _tops(files) if top[0] != "." and top not in (*packages, *tests)}
    named = {top for top in tops if top in words or top.removesuffix(".py") in words}
    return tuple(sorted((named | ({"conftest.py"} & tops)) - {"setup.py"}))
