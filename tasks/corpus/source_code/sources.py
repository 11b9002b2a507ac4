"""Source files with their licences, in an order that depends on nothing but names."""

import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path, PurePath

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.objects import checksum_bytes
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.corpus.config import CodeSource
from ostinato.tasks.corpus.source_code.git_source import open_commit, read_commit
from ostinato.tasks.corpus.source_code.row_source import pin_rows, read_rows

MAX_FILE_CHARACTERS = 200_000
MIN_FILE_CHARACTERS = 200
_MAX_FILE_BYTES = 4 * MAX_FILE_CHARACTERS  # of a file of so many characters
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
    """What each source holds now: a commit, or a checksum. Empty for packages, whose content is not looked at.
    ConfigError for a place that cannot be read.
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
    """Each source with what it held."""
    names = [source.path or source.name or source.kind for source in sources]
    return tuple(f"{name} at {pin}" if pin else name for name, pin in zip(names, pins, strict=True))


def read_source(
    source: CodeSource, pin: str, settings: Settings, dropped: Counter[str]
) -> Iterator[SourceFile]:
    """The files of one source as `pin_sources` found it. What cannot be a file is counted in `dropped`."""
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
            for path, content in read_commit(repository, commit, _is_wanted, dropped):
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
        yield from _make_file(name, origin.name, origin.read_bytes(), licence)
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
            yield from _make_file(source, relative.as_posix(), path.read_bytes(), licence)


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
