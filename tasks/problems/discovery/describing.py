"""From a package, a directory or a git repository that nobody prepared to the sources of a recipe."""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import Field

from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.folders import is_below
from ostinato.infra.platform.git import read_tree, run_git
from ostinato.infra.platform.packages import newest_version, pin
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.source_archives import (
    SourceArchive,
    fetch_archive,
    fetch_wheel,
    read_archive,
    read_wheel,
    store_archive,
)
from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.problems.config import (
    GitSource,
    RepositorySource,
    Source,
    refuse_runner,
)
from ostinato.tasks.problems.discovery.layout import Layout, find_layout
from ostinato.tasks.problems.discovery.metadata import Metadata, read_metadata
from ostinato.tasks.problems.repositories import strip_prefix

_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?")
_URL = re.compile(r"(https?|ssh|git|file)://|[\w.-]+@[\w.-]+:")
_IN_BOX = frozenset(("pytest", "pluggy", "iniconfig", "packaging"))  # the test runner's own
_SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules", "venv", "env", "site-packages"))
_MAX_FILE_BYTES = 4 << 20
_MAX_TREE_BYTES = 64 << 20
_TRIED_REQUIREMENTS = 16  # of tests; each takes some seconds of pip
_MAX_TEST_WHEELS_BYTES = 30 << 20  # all of it lies beside the code in every box


class Described(Record):
    """Sources of a recipe, and remarks for the user."""

    repository: RepositorySource
    history: GitSource | None = None
    """of a git repository, where asked for"""
    remarks: tuple[str, ...] = ()


class Project(Record):
    """A project's files described: paths, dependencies, and what its metadata calls it."""

    source: Source
    distribution: str = Field(description="name of the project")
    remarks: tuple[str, ...] = ()


class _Taken(Record):
    """Files of a source before anything is known of them."""

    files: dict[str, bytes]
    archive: SourceArchive
    clone: Path | None = None


def describe_source(place: str, name: str | None, cache: Path, max_commits: int) -> Described:
    """Sources for `place`: NAME or NAME==VERSION of the index, a directory, or a git repository by path or
    URL. Nothing of it is run here.

    ConfigError when there is nothing at `place`, ProblemError when no code or no tests are found.
    """
    taken = _take(place, name, cache)
    project = describe_files(taken.files, taken.archive.name, cache)
    shared = project.source.model_dump()
    repository = RepositorySource.model_validate(shared | taken.archive.model_dump())
    if max_commits and taken.clone is None:
        raise ConfigError(f"--commits {max_commits} of {place}, wanted a git repository")
    told = {
        "name": f"{taken.archive.name}-commits",
        "path": str(taken.clone),
        "max_commits": max_commits,
    }
    history = GitSource.model_validate(shared | told) if max_commits else None
    return Described(repository=repository, history=history, remarks=project.remarks)


def describe_files(
    files: Mapping[str, bytes],
    name: str,
    cache: Path,
    *,
    package: str = "",
    requires: Iterable[str] = (),
) -> Project:
    """The source `name` of a project's files. `package`: how the project is called where no metadata says it
    (`name` when empty); `requires`: packages that it needs beside those that its metadata names.
    ProblemError when no code or no tests are found.
    """
    metadata = read_metadata(files, package or name)
    metadata = metadata.model_copy(update={"requires": (*metadata.requires, *requires)})
    layout = find_layout(
        files, metadata.name, top_level=metadata.top_level, test_patterns=metadata.test_patterns
    )
    if refusal := refuse_runner(name, layout.package_paths):
        raise ProblemError(refusal)
    dependencies, remarks = _dependencies(files, metadata, layout, cache)
    source = Source(
        name=name,
        package_paths=layout.package_paths,
        test_paths=layout.test_paths,
        kept_paths=layout.kept_paths,
        stripped_prefix=layout.stripped_prefix,
        dependencies=dependencies,
        is_installed=True,
        generated_files=_version_modules(metadata, layout),
    )
    return Project(source=source, distribution=metadata.name, remarks=remarks)


def _take(place: str, name: str | None, cache: Path) -> _Taken:
    directory = Path(place).expanduser()
    if _URL.match(place) or (directory / ".git").exists() or (directory / "HEAD").is_file():
        return _take_git(place if _URL.match(place) else str(directory.resolve()), name, cache)
    if directory.is_dir():
        files = _read_directory(directory)
        archive = store_archive(name or canonicalize_name(directory.resolve().name), files, cache)
        return _Taken(files=files, archive=archive)
    if "/" in place or not _PACKAGE.fullmatch(place):
        raise ConfigError(
            f"{place!r} is no directory, wanted a directory, a git repository (path or URL) or a "
            "package, NAME or NAME==VERSION"
        )
    package, _, version = place.partition("==")
    source = SourceArchive(name=package, version=version or newest_version(package))
    path = fetch_archive(source, cache)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return _Taken(files=read_archive(path), archive=source.model_copy(update={"sha256": sha256}))


def _take_git(place: str, name: str | None, cache: Path) -> _Taken:
    """The newest commit, out of a clone whose configuration is ours."""
    stem = re.sub(r"\.git$", "", place.rstrip("/")).replace(":", "/").rpartition("/")[2]
    kept = hashlib.sha256(place.encode()).hexdigest()[:12]
    clone = cache / "git" / f"{stem}-{kept}.git"
    if not (clone / "HEAD").is_file():
        clone.parent.mkdir(parents=True, exist_ok=True)
        run_git(None, "clone", "--quiet", "--bare", "--no-hardlinks", "--", place, str(clone))
    files = _small(read_tree(clone, "HEAD", _MAX_TREE_BYTES))
    archive = store_archive(name or canonicalize_name(stem), files, cache)
    return _Taken(files=files, archive=archive, clone=clone)


def _read_directory(directory: Path) -> dict[str, bytes]:
    """Regular files below a directory. Links and hidden folders are passed over."""
    files: dict[str, bytes] = {}
    for place, names, file_names in os.walk(directory):
        folder = Path(place)
        names[:] = [n for n in names if n[0] != "." and n not in _SKIPPED_FOLDERS]
        names[:] = [n for n in names if not (folder / n / "pyvenv.cfg").exists()]
        for file_name in file_names:
            path = folder / file_name
            if not path.is_symlink() and path.is_file():
                files[path.relative_to(directory).as_posix()] = path.read_bytes()
    return _small(files)


def _small(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if len(content) <= _MAX_FILE_BYTES}


def _dependencies(
    files: Mapping[str, bytes], metadata: Metadata, layout: Layout, cache: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Pinned packages that code and tests import, and remarks on imports that nothing provides."""
    own = canonicalize_name(metadata.name)
    moved = strip_prefix(files, layout.stripped_prefix) if layout.stripped_prefix else files
    here = {path.partition("/")[0].removesuffix(".py") for path in moved if path.endswith(".py")}
    here |= {Path(path).stem for path in moved if is_below(path, layout.test_paths)}
    imported = _imports(moved, (*layout.package_paths, *layout.test_paths))
    needed = imported - here
    needed -= sys.stdlib_module_names | _IN_BOX | {"_pytest", "py"}
    runtime = [text for text in metadata.requires if _name(text) not in _IN_BOX | {own}]
    # boxes have no time zones of the system
    pins = set(pin([*runtime, *(["tzdata"] if "zoneinfo" in imported else [])]))
    missing = needed - _provided(pins, cache)
    wanted = [text for text in metadata.test_requires if _is_test_library(text, own)]
    # by name first: what a distribution holds is known only when it is here
    wanted.sort(key=lambda text: not _resembles(text, missing))
    remarks: list[str] = []
    for text in wanted[:_TRIED_REQUIREMENTS]:
        if not missing:
            break
        more, remark = _added_by(text, pins, cache)
        remarks += [remark] if remark else []
        if _provided(more, cache) & missing:
            pins |= more
            missing -= _provided(more, cache)
    if missing:
        remarks.append(f"imported, and named by no metadata: {', '.join(sorted(missing))}")
    found = sorted(item for item in pins if _name(item) not in _IN_BOX | {own})
    return tuple(found), tuple(remarks)


def _added_by(requirement: str, pins: Collection[str], cache: Path) -> tuple[set[str], str]:
    """Packages that a requirement of tests adds, or none and the reason."""
    try:
        more = set(pin([*sorted(pins), requirement])) - set(pins)
    except ConfigError as error:
        return set(), f"{requirement} left out: {error!s:.200}"
    size = sum(fetch_wheel(item, cache).stat().st_size for item in more)
    if size > _MAX_TEST_WHEELS_BYTES:
        return set(), f"{requirement} left out: its wheels take {size >> 20} MiB"
    return more, ""


def _name(requirement: str) -> str:
    return canonicalize_name(re.split(r"[\[<>=!~ ;]", requirement)[0])


def _is_test_library(requirement: str, own: str) -> bool:
    """Plugins are not loaded in boxes, so a pytest plugin is of no use."""
    name = _name(requirement)
    return name not in _IN_BOX | {own} and not name.startswith("pytest-")


def _resembles(requirement: str, modules: Iterable[str]) -> bool:
    """Whether a distribution's name and an imported module's are alike: python-dateutil and dateutil."""
    name = re.sub(r"^(python|py)-?|-?(python|py)$", "", _name(requirement)).replace("-", "_")
    return any(name in (module.lower(), module.lower() + "s") for module in modules)


def _imports(files: Mapping[str, bytes], roots: Sequence[str]) -> set[str]:
    """First names of absolute imports below some paths."""
    found: set[str] = set()
    for path, content in files.items():
        if not path.endswith(".py") or not is_below(path, roots):
            continue
        try:
            tree = parse_python(content)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def _provided(pins: Iterable[str], cache: Path) -> set[str]:
    """Import names that wheels provide."""
    found: set[str] = set()
    for requirement in pins:
        paths = read_wheel(fetch_wheel(requirement, cache), is_whole=True)
        found |= {path.partition("/")[0].partition(".")[0] for path in paths}
    return found


def _version_modules(metadata: Metadata, layout: Layout) -> dict[str, str]:
    """Modules that a build would write, with a version that says so."""
    text = '__version__ = version = "0"\n__version_tuple__ = version_tuple = (0,)\n'
    prefix = f"{layout.stripped_prefix}/" if layout.stripped_prefix else ""
    return {path.removeprefix(prefix): text for path in metadata.version_files}
