"""Derives the sources of a recipe from an unprepared package, directory or git repository."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import Field

from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.folders import list_files
from ostinato.infra.platform.git import fetch_newest, list_tree, read_tree
from ostinato.infra.platform.packages import newest_version
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.source_archives import (
    SourceArchive,
    fetch_archive,
    read_archive,
    store_archive,
)
from ostinato.infra.sandbox.discovery.collection import unloaded_plugins, write_rules
from ostinato.infra.sandbox.discovery.layout import ProjectLayout, find_layout
from ostinato.infra.sandbox.discovery.metadata import Metadata, read_metadata
from ostinato.tasks.problems.config import GitSource, ProjectSource, RepositorySource, refuse_runner
from ostinato.tasks.problems.discovery.dependencies import find_dependencies
from ostinato.tasks.problems.repositories import MAX_FILE_BYTES, write_metadata

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a recipe
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?")
_URL = re.compile(r"(https?|ssh|git|file)://|[\w.-]+@[\w.-]+:")
_AUTHORITY = re.compile(r"\w+://[^/]*/|[\w.-]+@[\w.-]+:")
_AT_REVISION = re.compile(r"(.*[^/@])@(\w[\w./-]*)")
_SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules", "venv", "env", "site-packages"))
_MAX_TREE_BYTES = 64 << 20
_NAMED_FILES = 3  # files named in the remark on those left out


class DescribedSource(Record):
    """Sources of a recipe, and remarks for the user."""

    repository: RepositorySource
    history: GitSource | None = None
    """history of a git repository, if requested"""
    remarks: tuple[str, ...] = ()


class Project(Record):
    """Description of a project's files: paths, dependencies, and the project's name in its metadata."""

    source: ProjectSource
    distribution: str = Field(description="name of the project")
    version: str = Field(default="0", description="0 if only a build would know it")
    remarks: tuple[str, ...] = ()


class _ProjectFiles(Record):
    """Files of a source, before they are analysed."""

    files: dict[str, bytes]
    archive: SourceArchive
    clone: Path | None = None
    commit: str = ""
    remarks: tuple[str, ...] = ()


def describe_source(place: str, name: str | None, cache: Path, max_commits: int) -> DescribedSource:
    """Sources for `place`: NAME or NAME==VERSION of the index, a directory, or a git repository by path or
    URL, optionally with @ and a branch, tag or commit. No code of it runs here.

    ConfigError if there is nothing at `place`, ProblemError if no code or no tests are found.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(
            f"--as {name!r}, wanted a name of letters, digits, '.', '_' and '-', at most 100 of them"
        )
    taken = _take(place, name, cache)
    project = describe_files(taken.files, taken.archive.name, cache)
    shared = project.source.model_dump()
    names = {canonicalize_name(text) for text in (taken.archive.name, project.distribution)}
    if len(names) > 1 or max_commits:  # a history has a name of its own
        shared["generated_files"] |= write_metadata(project.distribution, project.version)
    repository = RepositorySource.model_validate(shared | taken.archive.model_dump())
    if max_commits and taken.clone is None:
        raise ConfigError(f"--commits {max_commits} of {place}, wanted a git repository")
    details = {
        "name": f"{taken.archive.name}-commits",
        "path": str(taken.clone),
        "revision": taken.commit,
        "max_commits": max_commits,
    }
    history = GitSource.model_validate(shared | details) if max_commits else None
    remarks = (*taken.remarks, *project.remarks)
    return DescribedSource(repository=repository, history=history, remarks=remarks)


def describe_files(
    files: Mapping[str, bytes],
    name: str,
    cache: Path,
    *,
    package: str = "",
    requires: Iterable[str] = (),
) -> Project:
    """The source `name` of a project's files. `package`: the project's name if no metadata states it (empty: `name`).
    `requires`: packages that it needs in addition to those of its metadata. ProblemError if no code or no tests are
    found.
    """
    metadata = read_metadata(files, package or name)
    metadata = metadata.model_copy(update={"requires": (*metadata.requires, *requires)})
    layout = find_layout(
        files,
        metadata.name,
        top_level=metadata.top_level,
        test_patterns=metadata.rules.python_files,
        roots=metadata.import_roots,
        test_roots=metadata.rules.pythonpath,
        test_folders=metadata.rules.testpaths,
    )
    if refusal := refuse_runner(name, layout.package_paths):
        raise ProblemError(refusal)
    dependencies, remarks = find_dependencies(files, metadata, layout, cache)
    if remark := unloaded_plugins(files):
        remarks = (*remarks, remark)
    source = ProjectSource(
        name=name,
        package_paths=layout.package_paths,
        test_paths=layout.test_paths,
        kept_paths=layout.kept_paths,
        stripped_prefix=layout.stripped_prefix,
        dependencies=dependencies,
        is_installed=True,
        generated_files=_version_modules(metadata, layout)
        | write_rules(metadata.rules, layout.stripped_prefix),
    )
    return Project(
        source=source, distribution=metadata.name, version=metadata.version, remarks=remarks
    )


def _take(place: str, name: str | None, cache: Path) -> _ProjectFiles:
    repository, revision = _split_revision(place)
    if _URL.match(repository) or _is_repository(local_path(repository)):
        return _take_git(repository, revision, name, cache)
    directory = local_path(place)
    if os.path.isdir(directory):  # noqa: PTH112 Path.is_dir raises for long names and closed folders
        files, remarks = _read_directory(directory)
        archive = store_archive(name or _name_of(directory.resolve().name), files, cache)
        return _ProjectFiles(files=files, archive=archive, remarks=remarks)
    if "/" in place or not _PACKAGE.fullmatch(place):
        raise ConfigError(
            f"{place!r} is no directory, wanted a directory, a git repository (path or URL) or a "
            "package, NAME or NAME==VERSION"
        )
    package, _, version = place.partition("==")
    source = SourceArchive(name=package, version=version or newest_version(package))
    path = fetch_archive(source, cache)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    files = {path: content for path, content in read_archive(path).items() if _is_plain(path)}
    return _ProjectFiles(files=files, archive=source.model_copy(update={"sha256": sha256}))


def local_path(place: str) -> Path:
    """The path that a place names on this machine. `~` of an unknown user stays as it is."""
    return Path(os.path.expanduser(place))  # noqa: PTH111 Path.expanduser raises for unknown users


def _name_of(folder: str) -> str:
    """The name of a recipe from the name of a folder or repository."""
    text = re.sub(r"[^a-z0-9._]+", "-", canonicalize_name(folder))
    return text.strip("-._")[:80] or "project"


def _is_repository(directory: Path) -> bool:
    found = {name for name in (".git", "HEAD", "objects") if _exists(directory / name)}
    return ".git" in found or found == {"HEAD", "objects"}


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 Path.exists raises for long names and closed folders


def _split_revision(place: str) -> tuple[str, str]:
    """A repository's place, and the branch, tag or commit that follows it after @, or HEAD."""
    place = place.removeprefix("git+")
    authority = _AUTHORITY.match(place)
    start = authority.end() if authority else 0
    found = _AT_REVISION.fullmatch(place, start)
    if found is None or (not authority and _exists(local_path(place))):
        return place, "HEAD"
    return place[:start] + found[1], found[2]


def _take_git(place: str, revision: str, name: str | None, cache: Path) -> _ProjectFiles:
    """Files of a commit, read from a copy of the repository with our own configuration of git."""
    stem = re.sub(r"\.git$", "", place.rstrip("/")).replace(":", "/").rpartition("/")[2]
    if not _URL.match(place):
        place = str(local_path(place).resolve())
        stem = Path(place).name.removesuffix(".git")
    kept = hashlib.sha256(place.encode()).hexdigest()[:12]
    clone = cache / "git" / f"{_name_of(stem)}-{kept}.git"
    try:
        commit, remark = fetch_newest(place, revision, clone)
    except ProblemError as error:
        if "remote ref HEAD" not in str(error):
            raise
        raise ProblemError(
            f"{stem} is a git repository, and HEAD of it is no commit: make a commit, or append @BRANCH to the place"
        ) from None
    files = read_tree(clone, commit, _MAX_TREE_BYTES, max_file_bytes=MAX_FILE_BYTES)
    files = {path: content for path, content in files.items() if _is_plain(path)}
    left_out = (item.path for item in list_tree(clone, commit) if item.path not in files)
    remarks = tuple(filter(None, (remark, _describe_left_out(left_out))))
    archive = store_archive(name or _name_of(stem), files, cache)
    return _ProjectFiles(files=files, archive=archive, clone=clone, commit=commit, remarks=remarks)


def _read_directory(directory: Path) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Regular files below a directory, and a remark on files that are left out. Links and hidden folders are skipped."""

    def enters(path: str) -> bool:
        folder = path.rpartition("/")[2]
        is_kept = folder[0] != "." and folder not in _SKIPPED_FOLDERS
        return is_kept and not _exists(directory / path / "pyvenv.cfg")

    files: dict[str, bytes] = {}
    left_out: list[str] = []
    total_bytes = 0
    for path, size in list_files(directory, enters):
        if not 0 <= size <= MAX_FILE_BYTES or not _is_plain(path):
            left_out.append(path)
            continue
        try:
            with (directory / path).open(
                "rb"
            ) as file:  # bounded, because the file may grow meanwhile
                files[path] = file.read(MAX_FILE_BYTES)
        except OSError:  # unreadable, or deleted meanwhile
            left_out.append(path)
            continue
        total_bytes += len(files[path])
        if total_bytes > _MAX_TREE_BYTES:
            raise ProblemError(
                f"{directory} holds more than {_MAX_TREE_BYTES} bytes in files of at most {MAX_FILE_BYTES}, "
                "wanted less: give a git repository, or a folder with the project alone"
            )
    remark = _describe_left_out(left_out)
    return files, (remark,) if remark else ()


def _is_plain(path: str) -> bool:
    """Whether a path is printable, as recipes and reports need it."""
    return path.isprintable()


def _describe_left_out(paths: Iterable[str]) -> str:
    found = sorted(paths)
    if not found:
        return ""
    named = ", ".join(
        path.encode(errors="replace").decode()[-200:] for path in found[:_NAMED_FILES]
    )
    return (
        f"left out, as larger than {MAX_FILE_BYTES >> 20} MiB, unreadable, links to no file here, submodules or "
        "without a printable name: "
        f"{len(found)} files or folders, such as {named}"
    )


def _version_modules(metadata: Metadata, layout: ProjectLayout) -> dict[str, str]:
    """Modules that a build would write, with the version 0."""
    text = '__version__ = version = "0"\n__version_tuple__ = version_tuple = (0,)\n'
    prefix = f"{layout.stripped_prefix}/" if layout.stripped_prefix else ""
    return {path.removeprefix(prefix): text for path in metadata.version_files}
