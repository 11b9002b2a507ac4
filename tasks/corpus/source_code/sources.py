"""Source files with their licences, in an order that depends on nothing but names."""

import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.corpus.config import CodeSource

MAX_FILE_CHARACTERS = 200_000
MIN_FILE_CHARACTERS = 200
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


class _Row(BaseModel):
    """One line of a JSON lines file. Other fields are ignored."""

    text: str
    path: str
    licence: str | None = None


def read_source(source: CodeSource) -> Iterator[SourceFile]:
    """The files of one source."""
    match source.kind:
        case "standard_library":
            root = Path(sysconfig.get_paths()["stdlib"])
            yield from _read_tree("standard_library", root, STANDARD_LIBRARY_LICENCE)
        case "package":
            yield from _read_package(source.name)
        case "directory":
            root = Path(source.path)
            if not root.is_dir():
                raise ConfigError(f"corpus source {source.name!r}: no directory {source.path}")
            yield from _read_tree(source.name or root.name, root, source.licence or "unknown")
        case "jsonl":
            yield from _read_jsonl(source)


def _read_package(name: str) -> Iterator[SourceFile]:
    spec = util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"corpus source {name!r}: package is not installed")
    licence = package_licence(name)
    if not spec.submodule_search_locations:
        yield from _read_one(name, Path(spec.origin), Path(spec.origin).name, licence)
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
        relative = path.relative_to(root)
        is_file = stat.S_ISREG(path.lstat().st_mode)  # links may lead out, pipes never end
        if is_file and not SKIPPED_DIRECTORIES.intersection(relative.parts[:-1]):
            yield from _read_one(source, path, relative.as_posix(), licence)


def _read_one(source: str, path: Path, shown_path: str, licence: str) -> Iterator[SourceFile]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    if MIN_FILE_CHARACTERS <= len(text) <= MAX_FILE_CHARACTERS:
        yield SourceFile(source, shown_path, text, licence)


def _read_jsonl(source: CodeSource) -> Iterator[SourceFile]:
    path = Path(source.path)
    if not path.is_file():
        raise ConfigError(f"corpus source {source.name!r}: no file {source.path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = _Row.model_validate_json(line)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = ".".join(map(str, first["loc"])) or "the line"
                raise ConfigError(
                    f'{source.path}:{number}: {place}: {first["msg"]}, wanted {{"text": ..., "path": ...}}'
                ) from None
            licence = row.licence or source.licence or "unknown"
            if MIN_FILE_CHARACTERS <= len(row.text) <= MAX_FILE_CHARACTERS:
                yield SourceFile(source.name or path.stem, row.path, row.text, licence)
