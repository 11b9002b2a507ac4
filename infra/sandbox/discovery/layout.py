"""Layout of a project without a description: import root, product code, tests, and files that tests read."""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath

from pydantic import Field

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import is_below
from ostinato.infra.platform.record import Record

IMPORT_ROOTS = ("src", "lib", "source", "python")
TEST_FOLDERS = frozenset(("tests", "test", "testing", "unittests", "unit_tests"))
NO_PRODUCT = TEST_FOLDERS | frozenset(
    {
        "docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "tools", "scripts", "build", "dist",
        "tasks", "ci", "fuzz", "fuzzing", "venv", "node_modules", "requirements",
    }
)  # fmt: skip
NO_MODULES = frozenset(("setup.py", "conftest.py", "noxfile.py", "tasks.py", "versioneer.py"))
USUAL_PATTERNS = ("test_*.py", "*_test.py")  # the test runner's defaults
TEST_PATTERNS = (*USUAL_PATTERNS, "tests.py")
TEST_SCRIPT = "test.py"  # at the top level, if no file has a usual name
_MAX_NAMESPACES = 4  # nested in one another
_MAX_PARTS = 40  # a namespace package with more parts is taken whole
_WORD = re.compile(r"[A-Za-z0-9_.\-]+")


class ProjectLayout(Record):
    """Paths of a project on the import path, after files below `stripped_prefix` have moved up."""

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
    roots: Collection[str] = (),
    test_roots: Collection[str] = (),
    test_folders: Collection[str] = (),
) -> ProjectLayout:
    """ProjectLayout of the project `name`.

    `top_level`: import names that its metadata states. `test_patterns`: patterns of test files in addition to the
    usual ones. `roots`: folders in which its build searches packages. `test_roots`: folders that its tests add to
    the import path. `test_folders`: folders in which the project's settings look for tests. If code or tests are
    not found, ProblemError names the searched places.
    """
    wanted = {_import_name(item) for item in top_level} or {_import_name(name)}
    root = _import_root(files, wanted, roots, test_roots)
    moved = strip_prefix(files, root) if root else dict(files)
    patterns = (*TEST_PATTERNS, *test_patterns)
    packages = _packages(moved, wanted, patterns, from_root=bool(root))
    if not packages:
        raise ProblemError(
            f"{name}: no package or module of that name, wanted NAME/__init__.py or NAME.py at the "
            f"top level or below one of {list(dict.fromkeys((*roots, *IMPORT_ROOTS)))}; the top level holds "
            f"{sorted(_tops(files))[:20]}"
        )
    stated = {f"{path}/".removeprefix(f"{root}/").rstrip("/") for path in test_folders}
    tests = find_tests(moved, packages, patterns, stated)
    if not tests and TEST_SCRIPT in moved:
        tests, packages = (TEST_SCRIPT,), tuple(path for path in packages if path != TEST_SCRIPT)
    if not tests:
        raise ProblemError(
            f"{name}: no test file ({', '.join((*TEST_PATTERNS, TEST_SCRIPT))}) outside examples and docs; a source "
            "distribution may lack its tests: use a git repository instead"
        )
    return ProjectLayout(
        stripped_prefix=root,
        package_paths=packages,
        test_paths=tests,
        kept_paths=_kept(moved, packages, tests, test_roots),
    )


def strip_prefix(files: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    """The files by their path on the import path: files below `prefix` move up, others stay."""
    moved = {path: content for path, content in files.items() if not is_below(path, (prefix,))}
    for path, content in files.items():
        if is_below(path, (prefix,)):
            moved[path.removeprefix(f"{prefix}/")] = content
    return moved


def declares_namespace(init: bytes) -> bool:
    """Whether an __init__.py only says that other distributions hold parts of its package too."""
    return b"declare_namespace" in init or b"extend_path" in init


def _import_name(path: str) -> str:
    return re.sub(r"[-_./]+", "_", path.removesuffix(".py")).lower()


def _tops(files: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in files}


def _import_root(
    files: Mapping[str, bytes],
    wanted: Collection[str],
    roots: Collection[str],
    test_roots: Collection[str],
) -> str:
    """The folder on the import path: the one with a package of a wanted name, if any."""
    for root in (*roots, "", *IMPORT_ROOTS, *test_roots):
        moved = {
            path.removeprefix(f"{root}/"): text
            for path, text in files.items()
            if not root or is_below(path, (root,))
        }
        if _named(moved, wanted):
            return root
    for root in (*roots, *IMPORT_ROOTS):
        if any(path.startswith(f"{root}/") and path.endswith(".py") for path in files):
            return root
    return ""


def _code_tops(paths: Iterable[str]) -> list[str]:
    """Modules, and folders with modules, at the top level."""
    tops = {path.partition("/")[0] for path in paths if path.endswith(".py")}
    return sorted(top for top in tops if top not in NO_MODULES and top[0] not in "._")


def _packages(
    files: Mapping[str, bytes],
    wanted: Collection[str],
    test_patterns: Collection[str],
    *,
    from_root: bool,
) -> tuple[str, ...]:
    """Modules and packages of product code. Namespace packages give their parts, since dependencies share the folder."""
    named = _named(files, wanted)
    tops = _code_tops(path for path in files if not is_test(path, test_patterns))
    product = [top for top in tops if _is_product(top, files, from_root=from_root)]
    others = [part for top in product for part in _parts(top, files)]
    if not named and not others:
        parts = [part for top in tops if top not in NO_PRODUCT for part in _parts(top, files)]
        others = [part for part in parts if f"{part}/__init__.py" in files]
    return tuple(dict.fromkeys((*named, *others) if from_root or not named else named))


def _named(files: Mapping[str, bytes], wanted: Collection[str]) -> list[str]:
    """Modules and packages with a wanted import name, or in a namespace with one, and the __init__.py above them."""
    parts = [(_import_name(top), part) for top in _code_tops(files) for part in _parts(top, files)]
    named = [part for top, part in parts if top in wanted or _import_name(part) in wanted]
    above = {f"{folder}/__init__.py" for part in named for folder in PurePosixPath(part).parents}
    return [part for _, part in parts if part in above or part in named]


def _parts(path: str, files: Mapping[str, bytes], depth: int = 0) -> list[str]:
    """A module or package itself, or the outermost packages and modules of a namespace package."""
    init, inside = files.get(f"{path}/__init__.py"), f"{path}/"
    is_whole = init is not None and not declares_namespace(init)
    if path.endswith(".py") or is_whole or depth == _MAX_NAMESPACES:
        return [path]
    code = (name for name in files if name.startswith(inside) and name.endswith(".py"))
    held = sorted({name.removeprefix(inside).partition("/")[0] for name in code} - TEST_FOLDERS)
    found = [f"{path}/{name}" for name in held if not is_test(name, TEST_PATTERNS)]
    parts = [part for name in found for part in _parts(name, files, depth + 1)]
    return parts if len(parts) <= _MAX_PARTS else [path]


def _is_product(top: str, files: Mapping[str, bytes], *, from_root: bool) -> bool:
    if top in NO_PRODUCT or is_test(top, TEST_PATTERNS):
        return False
    # the top level also holds the project's own scripts; below src everything is meant to be imported
    return from_root or top.endswith(".py") or f"{top}/__init__.py" in files


def is_test(path: str, patterns: Iterable[str]) -> bool:
    """Whether a file has a test's name."""
    name = PurePosixPath(path).name
    return any(fnmatch(name, pattern) or fnmatch(path, pattern) for pattern in patterns)


def find_tests(
    files: Iterable[str],
    packages: Collection[str],
    patterns: Collection[str],
    stated: Collection[str],
) -> tuple[str, ...]:
    """Outermost folders of tests, and test files among product code; none of examples, docs and tools. `packages`:
    paths of product code. `patterns`: patterns of test files. `stated`: folders of tests that the project's settings
    name.
    """
    files = tuple(files)
    found: set[str] = set()
    for path in files:
        if not path.endswith(".py") or not is_test(path, patterns):
            continue
        folders = PurePosixPath(path).parts[:-1]
        if any(folder[0] == "." or folder in NO_PRODUCT - TEST_FOLDERS for folder in folders):
            continue
        above = [n for n, folder in enumerate(folders) if folder in TEST_FOLDERS]
        # a product folder called `testing`, like numpy's, holds helpers for users: only its test files are tests
        inside = bool(above) and not (is_below(path, packages) and folders[above[0]] == "testing")
        if inside:
            found.add("/".join(folders[: above[0] + 1]))
        else:
            found.add(_own_folder(path, packages, stated))
    folders = {path for path in found if not path.endswith(".py")}
    found -= {path for path in folders if has_parent_in(path, folders)}
    # the runner collects a file with an unusual name only if its path is given
    unusual = tuple({*patterns} - {*USUAL_PATTERNS})
    odd = (path for path in files if path.endswith(".py") and is_test(path, unusual))
    found |= {p for p in odd if not is_test(p, USUAL_PATTERNS) and has_parent_in(p, folders)}
    return tuple(sorted(found))


def has_parent_in(path: str, folders: Collection[str]) -> bool:
    """Whether a path lies in one of the folders, in time that does not grow with a set of them."""
    return any(str(parent) in folders for parent in PurePosixPath(path).parents)


def _own_folder(path: str, packages: Collection[str], stated: Collection[str]) -> str:
    """The folder of a test file that holds its conftest.py and helpers: a stated one, or its own outside of product
    code. The test file itself if product code shares the folder.
    """
    folders = [str(folder) for folder in PurePosixPath(path).parents if folder.name]
    candidates = [folder for folder in reversed(folders) if folder in stated]
    if not is_below(path, packages):
        candidates += folders[:1]
    alone = (folder for folder in candidates if not any(is_below(p, (folder,)) for p in packages))
    return next(alone, path)


def _kept(
    files: Mapping[str, bytes],
    packages: Collection[str],
    tests: Collection[str],
    test_roots: Collection[str],
) -> tuple[str, ...]:
    """Top-level entries that tests name in an import or a path, a top-level conftest.py, and the folders that tests
    add to the import path.
    """
    texts = [
        content for path, content in files.items() if is_below(path, tests) and path.endswith(".py")
    ]
    texts.append(files.get("conftest.py", b""))
    whole = [text.decode(errors="replace") for text in texts]
    words = {word for text in whole for word in _WORD.findall(text)}
    taken = {*tests, *(path.partition("/")[0] for path in packages)}
    tops = {top for top in _tops(files) if top[0] != "." and top not in taken}
    named = {top for top in tops if top in words or top.removesuffix(".py") in words}
    odd = {top for top in tops if not _WORD.fullmatch(top)}  # with spaces or accents
    named |= {top for top in odd if any(top in text for text in whole)}
    named |= {root for root in test_roots if not is_below(root, (*packages, *tests))}
    named &= {root for root in named if any(is_below(path, (root,)) for path in files)}
    return tuple(sorted((named | ({"conftest.py"} & tops)) - {"setup.py"}))
