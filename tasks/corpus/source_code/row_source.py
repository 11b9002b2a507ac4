"""Source files kept as rows of JSON lines or parquet: in a file or folder of this machine, or below s3://bucket/prefix."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ostinato.infra.platform.bounded_files import bounded_lines, parse_json
from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.objects import ObjectStore, checksum_bytes, open_object_store
from ostinato.infra.platform.row_files import open_parquet, read_parquet
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.corpus.config import CodeSource

_S3 = "s3://"
_OBJECT = TypeAdapter(dict[str, Any])


class CodeRow(BaseModel):
    """One source file of a row."""

    text: str
    path: str
    licence: str | None = None


@dataclass(frozen=True)
class _Place:
    """Files of a source in a store, with the start of the names that errors call them by."""

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
                f"corpus source {source.name!r}: path is {source.path!r}, where no file is, wanted a file or a "
                f"folder with names ending in .{source.kind}"
            )
        return dict(sorted(found.items()))


def pin_rows(source: CodeSource, settings: Settings) -> str:
    """Checksum of the files' names and of their checksums or ETags. The first file is looked at: ConfigError when
    it lacks a column, or cannot be read.
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
    """Rows, each with the name of its file. ConfigError when the files are others than those of `pin`."""
    place = _Place.of(source, settings)
    versions = place.versions(source)
    if _digest(versions) != pin:
        raise ConfigError(
            f"corpus source {source.name!r}: files of {source.path!r} changed after the stage began, wanted "
            "them as they were; run it again"
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
    """Names of the columns to unpack, the licence's where there is one."""
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
