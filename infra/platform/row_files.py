"""Rows of a user's file: parquet (with pyarrow installed), JSON lines, or a JSON list."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ostinato.infra.platform.bounded_files import bounded_lines, parse_json, read_bounded
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.hub_names import HubRepository, find_hub_repository

ROW_SUFFIXES = (".jsonl", ".parquet")  # of files with a row per line or record
MAX_PARQUET_BYTES = 4 << 30  # of a whole file, unpacked
_MAX_LIST_BYTES = 1 << 30  # of a JSON list, which is read as a whole
_BATCH_ROWS = 64  # unpacked at once


def find_conversations(data: str) -> Path | HubRepository:
    """The value of --data: the absolute path of a file, or a data set of the hub. ConfigError for anything else."""
    repository = find_hub_repository(data, ROW_SUFFIXES)
    if repository is None and not Path(data).is_file():
        raise ConfigError(
            f"--data {data!r} is not a file, wanted a {' or '.join(ROW_SUFFIXES)} file, or ORG/NAME of the hub"
        )
    return repository or Path(data).resolve()


def read_rows(
    path: Path, suffixes: Sequence[str], columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers from 1 (line numbers for JSON lines). `columns`: columns to unpack of a parquet file;
    None: all. ConfigError when the file is missing, has another suffix, does not parse or unpacks to too many bytes.
    """
    wanted = " or ".join(suffixes)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, wanted a file ending in {wanted}")
    if path.suffix not in suffixes:
        raise ConfigError(f"{path} ends in {path.suffix!r}, wanted {wanted}")
    if path.suffix == ".parquet":
        yield from enumerate(read_parquet(path, str(path), columns), 1)
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in bounded_lines(lines, str(path)):
                yield number, parse_json(f"{path}, row {number}", line)
    else:
        value = parse_json(str(path), read_bounded(path, _MAX_LIST_BYTES))
        yield from enumerate(value if isinstance(value, list) else [value], 1)


@contextmanager
def open_parquet(file: Path | IO[bytes], place: str) -> Iterator[Any]:
    """The file as pyarrow's ParquetFile. Only its footer is read here. `place`: its name in errors."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            f"{place}: parquet is read by pyarrow, which is not installed; pip install pyarrow, or "
            "write JSON lines"
        ) from None
    try:
        opened = parquet.ParquetFile(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{place} is not read as parquet: {error}") from None
    with opened:
        yield opened


def read_parquet(
    file: Path | IO[bytes], place: str, columns: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """Rows, unpacked in small batches."""
    num_bytes = 0
    with open_parquet(file, place) as opened:
        _refuse_large_groups(opened.metadata, place)
        with boundary(ConfigError, f"{place} is not read as parquet"):
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                num_bytes += batch.nbytes
                if num_bytes > MAX_PARQUET_BYTES:
                    raise ConfigError(
                        f"{place} unpacks to more than {MAX_PARQUET_BYTES} bytes; split it"
                    )
                yield from batch.to_pylist()


def _refuse_large_groups(metadata: Any, place: str) -> None:
    """Raises ConfigError when a row group is larger than a whole file may be, according to the footer."""
    for number in range(metadata.num_row_groups):
        num_bytes = metadata.row_group(number).total_byte_size
        if num_bytes > MAX_PARQUET_BYTES:
            raise ConfigError(
                f"{place}: row group {number} has {num_bytes} bytes, wanted at most {MAX_PARQUET_BYTES}"
            )
