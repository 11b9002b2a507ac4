"""Source files with their licences, in an order that depends only on names."""

import hashlib
import re
import shutil
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ostinato.infra.platform.bounded_files import bounded_lines, parse_json, read_bounded
from ostinato.infra.platform.errors import ConfigError, ProblemError, StorageError
from ostinato.infra.platform.git import fetch_commit, list_tree, read_blobs, resolve_commit, run_git
from ostinato.infra.platform.objects import ObjectStore, checksum_bytes, open_object_store
from ostinato.infra.platform.row_files import open_parquet, read_parquet
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.corpus.config import CodeSource

MAX_FILE_CHARACTERS = 200_000
MIN_FILE_CHARACTERS = 200
_MAX_FILE_BYTES = 4 * MAX_FILE_CHARACTERS  # UTF-8 has at most 4 bytes per character
STANDARD_LIBRARY_LICENCE = "PSF-2.0"
SKIPPED_DIRECTORIES = frozenset(
    ("__pycache__", "site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "_vendor")
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of general source code."""

    source: str
    path: str
    text: str
    licence: str


def pin_sources(sources: Sequence[CodeSource], settings: Settings) -> tuple[str, ...]:
    """Content of each source now, as a commit or checksum. Empty for packages, whose content is not
    read. Raises ConfigError for a source that cannot be read.
    """
    return tuple(_pin(source, settings) for source in sources)


def _pin(source: CodeSource, settings: Settings) -> str:
    match source.kind:
        case "git":
            return open_commit(source, source.revision, settings)[1]
        case "jsonl" | "parquet":
            return pin_rows(source, settings)
        case "directory":
            files = [
                f"{file.path} {checksum_bytes(file.text.encode())}"
                for file in _read_directory(source)
            ]
            return checksum_bytes("\n".join(files).encode())
        case _:
            return ""


def describe_pins(sources: Sequence[CodeSource], pins: Sequence[str]) -> tuple[str, ...]:
    """Each source with its commit or checksum."""
    names = [source.path or source.name or source.kind for source in sources]
    return tuple(f"{name} at {pin}" if pin else name for name, pin in zip(names, pins, strict=True))


def read_source(
    source: CodeSource, pin: str, settings: Settings, dropped: Counter[str]
) -> Iterator[SourceFile]:
    """The files of one source as `pin_sources` found it. Entries that are no files count in `dropped`."""
    match source.kind:
        case "standard_library":
            root = Path(sysconfig.get_paths()["stdlib"])
            yield from _read_tree("standard_library", root, STANDARD_LIBRARY_LICENCE)
        case "package":
            yield from _read_package(source.name)
        case "directory":
            yield from _read_directory(source)
        case "git":
            repository, commit = open_commit(source, pin, settings)
            name = source.name or PurePath(source.path.rpartition(":")[2]).name.removesuffix(".git")
            for path, content in read_commit(repository, commit, dropped):
                yield from _make_file(name, path, content, source.licence or "unknown")
        case "jsonl" | "parquet":
            for stem, row in read_rows(source, pin, settings):
                if MIN_FILE_CHARACTERS <= len(row.text) <= MAX_FILE_CHARACTERS:
                    licence = row.licence or source.licence or "unknown"
                    yield SourceFile(source.name or stem, row.path, row.text, licence)


def _read_directory(source: CodeSource) -> Iterator[SourceFile]:
    root = Path(source.path)
    if not root.is_dir():
        raise ConfigError(f"corpus source {source.name!r}: no directory {source.path}")
    yield from _read_tree(source.name or root.name, root, source.licence or "unknown")


def _read_package(name: str) -> Iterator[SourceFile]:
    spec = util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"corpus source {name!r}: package is not installed")
    licence = package_licence(name)
    if not spec.submodule_search_locations:
        origin = Path(spec.origin)
        if _is_wanted(PurePath(origin.name), origin.stat().st_size):
            content = read_bounded(origin, _MAX_FILE_BYTES)
            yield from _make_file(name, origin.name, content, licence)
        return
    for location in spec.submodule_search_locations:
        yield from _read_tree(name, Path(location), licence)


def package_licence(import_name: str) -> str:
    """Licence that an installed package's distribution declares, else "unknown"."""
    for distribution in metadata.packages_distributions().get(import_name, []):
        fields = metadata.metadata(distribution)
        if fields["License-Expression"]:
            return fields["License-Expression"]
        for classifier in fields.get_all("Classifier") or []:
            if classifier.startswith("License ::"):
                return classifier.rpartition(" :: ")[2]
        if fields["License"]:
            return fields["License"].splitlines()[0][:60]
    return "unknown"


def _read_tree(source: str, root: Path, licence: str) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative, status = path.relative_to(root), path.lstat()
        is_file = stat.S_ISREG(status.st_mode)  # links may lead out, pipes never end
        if is_file and _is_wanted(relative, status.st_size):
            content = read_bounded(path, _MAX_FILE_BYTES)
            yield from _make_file(source, relative.as_posix(), content, licence)


def _is_wanted(path: PurePath, num_bytes: int) -> bool:
    is_skipped = bool(SKIPPED_DIRECTORIES.intersection(path.parts[:-1]))
    return path.name.endswith(".py") and num_bytes <= _MAX_FILE_BYTES and not is_skipped


def _make_file(source: str, path: str, content: bytes, licence: str) -> Iterator[SourceFile]:
    try:
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return
    if MIN_FILE_CHARACTERS <= len(text) <= MAX_FILE_CHARACTERS:
        yield SourceFile(source, path, text, licence)


SUBMODULE, LFS_POINTER = "submodule", "lfs_pointer"  # reasons to leave a path out
_LFS_START = b"version https://git-lfs.github.com/spec/"
_URL = re.compile(r"[\w+.-]+://|[\w.-]+@[\w.-]+:")
_BLOBS_AT_ONCE = 256


def open_commit(source: CodeSource, revision: str, settings: Settings) -> tuple[Path, str]:
    """(local repository with the revision, its commit). The repository of a URL is kept in the
    cache. Raises ConfigError without git, repository or revision.
    """
    place = f"corpus source {source.name!r}: path is {source.path!r}"
    if shutil.which("git") is None:
        raise ConfigError(f"{place}, of kind git, and no program git is on PATH; install it")
    try:
        if _URL.match(source.path):
            name = hashlib.sha256(source.path.encode()).hexdigest()[:16]
            repository = settings.cache_directory / "git-sources" / f"{name}.git"
            return repository, fetch_commit(source.path, revision, repository)
        repository = Path(source.path).expanduser()
        if not ((repository / ".git").exists() or (repository / "HEAD").is_file()):
            raise ConfigError(f"{place}, wanted a git repository or the URL of one")
        _refuse_partial(repository, place)
        return repository, resolve_commit(repository, revision)
    except ProblemError as error:
        raise ConfigError(
            f"{place} with revision {revision!r}, wanted a readable repository and a full commit id, a tag or a "
            f"branch of it: {error}"
        ) from None


def read_commit(
    repository: Path, commit: str, dropped: Counter[str]
) -> Iterator[tuple[str, bytes]]:
    """Yields paths and contents in the order of a directory source. Submodules and pointers to large
    files are counted in `dropped`.
    """
    keys: dict[PurePosixPath, str] = {}
    for entry in list_tree(repository, commit):
        path = PurePosixPath(entry.path)
        if entry.kind != "blob":
            dropped[SUBMODULE] += 1
        elif not entry.is_link and _is_wanted(path, entry.num_bytes):
            keys[path] = entry.key
    paths = sorted(keys)
    for start in range(0, len(paths), _BLOBS_AT_ONCE):
        some = paths[start : start + _BLOBS_AT_ONCE]
        blobs = read_blobs(repository, [keys[path] for path in some])
        for path in some:
            content = blobs[keys[path]]
            if content.startswith(_LFS_START):
                dropped[LFS_POINTER] += 1
            else:
                yield path.as_posix(), content


def _refuse_partial(repository: Path, place: str) -> None:
    """Refuses a partial clone: older git would fetch missing objects by a program that the clone's
    configuration may name.
    """
    settings = run_git(repository, "config", "--list", "--name-only", "-z").decode().split("\0")
    for name in settings:
        if name == "extensions.partialclone" or name.endswith(".promisor"):
            raise ConfigError(
                f"{place}, a partial clone ({name} is set), wanted a full one or its URL"
            )


_S3 = "s3://"
_OBJECT = TypeAdapter(dict[str, Any])


class CodeRow(BaseModel):
    """One source file of a row."""

    text: str
    path: str
    licence: str | None = None


@dataclass(frozen=True)
class _Place:
    """Files of a source in a store. Error messages name a file as `root`/key."""

    store: ObjectStore
    root: str
    key: str

    @classmethod
    def of(cls, source: CodeSource, settings: Settings) -> "_Place":
        if source.path.startswith(_S3):
            bucket, _, key = source.path.removeprefix(_S3).partition("/")
            return cls(open_object_store(settings, _S3 + bucket), _S3 + bucket, key.rstrip("/"))
        path = Path(source.path).expanduser().resolve()
        return cls(ObjectStore.from_url(path.parent.as_uri()), str(path.parent), path.name)

    def versions(self, source: CodeSource) -> dict[str, str]:
        found = self.store.versions(self.key, f".{source.kind}")
        if not found:
            raise ConfigError(
                f"corpus source {source.name!r}: path is {source.path!r}, where no file was found, wanted a file "
                f"or a folder with names ending in .{source.kind}"
            )
        return dict(sorted(found.items()))


def pin_rows(source: CodeSource, settings: Settings) -> str:
    """Checksum of the files' names and of their checksums or ETags. Raises ConfigError if the first
    file lacks a column or cannot be read.
    """
    try:
        place = _Place.of(source, settings)
        versions = place.versions(source)
        first = next(iter(versions))
        with place.store.open(first) as file:
            if source.kind == "parquet":
                _columns_of(source, file, f"{place.root}/{first}")
            else:
                next(_read_lines(source, file, f"{place.root}/{first}"), None)
    except StorageError as error:
        raise ConfigError(
            f"corpus source {source.name!r}: path is {source.path!r}, wanted a place that can be read: {error}"
        ) from None
    return _digest(versions)


def read_rows(source: CodeSource, pin: str, settings: Settings) -> Iterator[tuple[str, CodeRow]]:
    """Rows, each with its file's name. Raises ConfigError if the files differ from those of `pin`."""
    place = _Place.of(source, settings)
    versions = place.versions(source)
    if _digest(versions) != pin:
        raise ConfigError(
            f"corpus source {source.name!r}: files of {source.path!r} changed after the stage began, wanted "
            "them unchanged; run it again"
        )
    for key in versions:
        name = f"{place.root}/{key}"
        with place.store.open(key) as file:
            rows = _read_table if source.kind == "parquet" else _read_lines
            for row in rows(source, file, name):
                yield Path(key).stem, row


def _digest(versions: dict[str, str]) -> str:
    return checksum_bytes(
        "\n".join(f"{key} {version}" for key, version in versions.items()).encode()
    )


def _columns_of(source: CodeSource, file: IO[bytes], name: str) -> list[str]:
    """Names of the columns to read, including the licence's if it exists."""
    with open_parquet(file, name) as opened:
        there = opened.schema_arrow.names
    is_optional = source.licence_column == CodeSource.model_fields["licence_column"].default
    for field in ("text_column", "path_column", "licence_column"):
        column = getattr(source, field)
        if column not in there and not (field == "licence_column" and is_optional):
            raise ConfigError(
                f"corpus source {source.name!r}: {field} is {column!r}, wanted a column of {name}: "
                f"{', '.join(there)}"
            )
    wanted = (source.text_column, source.path_column, source.licence_column)
    return [column for column in dict.fromkeys(wanted) if column in there]


def _read_table(source: CodeSource, file: IO[bytes], name: str) -> Iterator[CodeRow]:
    columns = _columns_of(source, file, name)
    for number, row in enumerate(read_parquet(file, name, columns), start=1):
        yield _make_row(source, row, f"{name}, row {number}")


def _read_lines(source: CodeSource, file: IO[bytes], name: str) -> Iterator[CodeRow]:
    for number, line in bounded_lines(file, name):
        yield _make_row(source, line, f"{name}:{number}")


def _make_row(source: CodeSource, row: bytes | dict[str, Any], place: str) -> CodeRow:
    names = {
        "text": source.text_column,
        "path": source.path_column,
        "licence": source.licence_column,
    }
    try:
        values = row if isinstance(row, dict) else _OBJECT.validate_python(parse_json(place, row))
        return CodeRow.model_validate(
            {field: values[column] for field, column in names.items() if column in values}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(names.get(str(part), str(part)) for part in first["loc"]) or "the line"
        raise ConfigError(
            f'{place}: {where}: {first["msg"]}, wanted {{"{source.text_column}": ..., '
            f'"{source.path_column}": ...}}'
        ) from None
