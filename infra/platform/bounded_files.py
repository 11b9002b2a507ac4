"""Reads untrusted files. Size, nesting depth and syntax are checked before the content is used.

Every error is one sentence that names the file, the value seen and the limit.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ostinato.infra.platform.errors import ConfigError, OstinatoError

MAX_FILE_BYTES = 256 << 20
MAX_ROW_BYTES = 64 << 20
MAX_TOML_BYTES = 1 << 20
MAX_DEPTH = 100
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHER_BYTES = bytes(set(range(256)) - set(_STEPS))
# tomllib takes quadratic time for a key of many parts
_LONG_KEY = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){100}")


def read_bounded(
    path: Path,
    most_bytes: int = MAX_FILE_BYTES,
    error_type: type[OstinatoError] = ConfigError,
) -> bytes:
    """Content of a file. A file of more than `most_bytes` raises `error_type`."""
    num_bytes = path.stat().st_size
    if num_bytes <= most_bytes:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)  # a device reports no size, and a file may grow
        num_bytes = len(content)
        if num_bytes <= most_bytes:
            return content
    raise error_type(f"{path} has {num_bytes} bytes or more, wanted at most {most_bytes}")


def bounded_lines(file: IO[bytes], place: str) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1. ConfigError for a line that is too long."""
    for number in itertools.count(1):
        line = file.readline(MAX_ROW_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_ROW_BYTES:
            raise ConfigError(
                f"{place}, row {number} has more than {MAX_ROW_BYTES} bytes, wanted at most that many and "
                "one JSON value per line"
            )
        if line.strip():
            yield number, line


def parse_json(
    place: str,
    content: bytes | str,
    error_type: type[Exception] = ConfigError,
    *,
    finite: bool = False,
) -> Any:
    """The value of a JSON text. `finite`: NaN and infinity are refused."""
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    depth = _depth(data)
    if depth > MAX_DEPTH:
        raise error_type(f"{place} is nested {depth} levels deep, wanted at most {MAX_DEPTH}")
    try:
        return json.loads(data.decode(), parse_constant=_refuse_number if finite else None)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{place} is not JSON: {error}") from None


def parse_toml(
    place: str, content: bytes, error_type: type[OstinatoError] = ConfigError
) -> dict[str, Any]:
    """The tables of a TOML text."""
    if len(content) > MAX_TOML_BYTES:
        raise error_type(f"{place} has {len(content)} bytes, wanted at most {MAX_TOML_BYTES}")
    try:
        text = content.decode()
        if _LONG_KEY.search(text):
            raise error_type(f"{place} has a key of more than 100 parts, wanted fewer")
        return tomllib.loads(text)
    except RecursionError:
        raise error_type(
            f"{place} is nested {_depth(content)} levels deep, wanted at most {MAX_DEPTH}"
        ) from None
    except ValueError as error:
        raise error_type(f"{place} is not TOML: {error}") from None


def _depth(text: bytes) -> int:
    """Maximum number of brackets that are open at once, outside of strings."""
    if b"\\" in text:
        text = re.sub(rb"\\.", b"", text, flags=re.DOTALL)
    outside = b"".join(text.split(b'"')[::2])
    brackets = outside.translate(None, delete=_OTHER_BYTES)
    return max(itertools.accumulate(_STEPS[code] for code in brackets), default=0)


def _refuse_number(text: str) -> float:
    raise ValueError(f"it holds {text}, wanted finite numbers")
