"""A checkpoint as a directory.

model.safetensors   canonical weights
spec.json           ModelSpec
tokenizer.json      copied from the caller
published/          only for an imported model: config.json, chat template and other small files
adapter/            only if an adapter was trained: its files for PEFT
checkpoint.json     written last: checksum of the weights, metadata
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.models.checkpoint.adapter_files import ADAPTER, TrainedAdapter, write_adapter
from ostinato.models.checkpoint.full_disk import naming_full_disk
from ostinato.models.checkpoint.streaming import TensorFiles, write_tensors
from ostinato.models.flushing import make_parents, place_folder, put_back
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import check_shapes, weight_shapes

WEIGHTS = "model.safetensors"
SPEC = "spec.json"
TOKENIZER = "tokenizer.json"
PUBLISHED = "published"
MARKER = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Content of a checkpoint directory, in memory."""

    spec: ModelSpec
    weights: dict[str, Tensor]
    metadata: dict[str, Any]
    tokenizer_path: Path | None


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """Checkpoint directory whose weights stay on disk."""

    spec: ModelSpec
    read: Callable[[str], Tensor]  # a weight by canonical name
    metadata: dict[str, Any]
    tokenizer_path: Path | None

    @property
    def weights(self) -> "StoredWeights":
        """Weights by canonical name. Each access reads from disk."""
        return StoredWeights(self)


class StoredWeights(Mapping[str, Tensor]):
    """Weights of an open checkpoint, in the order of its spec."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._read, self._names = opened.read, weight_shapes(opened.spec)

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def save_checkpoint(
    directory: Path,
    spec: ModelSpec,
    weights: Mapping[str, Tensor] | Iterator[tuple[str, Tensor]],
    *,
    tokenizer_path: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    adapter: TrainedAdapter | None = None,
) -> Path:
    """Writes a checkpoint. Readers never see a partial one. If it replaces another, neither exists
    for a moment, and a kill leaves one of the two. Metadata is JSON. The folder `published/` beside
    the tokenizer is copied too. An iterator gives fp32 weights in the order of the spec, and is
    read one tensor at a time.
    """
    if isinstance(weights, Mapping):
        check_shapes(spec, {name: tuple(tensor.shape) for name, tensor in weights.items()})

    def fill(folder: Path) -> None:
        if isinstance(weights, Mapping):
            whole = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(whole, folder / WEIGHTS)
        else:
            layout = {name: (shape, torch.float32) for name, shape in weight_shapes(spec).items()}
            write_tensors(folder / WEIGHTS, layout, weights)
        if tokenizer_path is not None:
            shutil.copyfile(tokenizer_path, folder / TOKENIZER)
            if (tokenizer_path.parent / PUBLISHED).is_dir():
                shutil.copytree(tokenizer_path.parent / PUBLISHED, folder / PUBLISHED)
        if adapter is not None:
            write_adapter(folder / ADAPTER, spec, adapter)

    return _save(directory, spec, fill, metadata or {})


def stream_checkpoint(
    directory: Path,
    spec: ModelSpec,
    dtypes: Mapping[str, torch.dtype],
    weights: Iterable[tuple[str, Tensor]],
    *,
    files: Mapping[str, bytes],
    metadata: Mapping[str, Any],
) -> Path:
    """Like `save_checkpoint`, with one tensor in memory at a time. `weights` come in the order of
    the spec. `files` holds contents by path below the checkpoint.
    """
    layout = {name: (shape, dtypes[name]) for name, shape in weight_shapes(spec).items()}

    def fill(folder: Path) -> None:
        write_tensors(folder / WEIGHTS, layout, weights)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)

    return _save(directory, spec, fill, metadata)


def _save(
    directory: Path,
    spec: ModelSpec,
    fill: Callable[[Path], None],
    metadata: Mapping[str, Any],
) -> Path:
    temporary = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
    try:
        with naming_full_disk(directory):
            make_parents(temporary)
            temporary.mkdir()
            fill(temporary)
            (temporary / SPEC).write_text(spec.model_dump_json(indent=1))
            marker = {
                "weights_xxh3_128": checksum_file(temporary / WEIGHTS),
                "metadata": dict(metadata),
            }
            (temporary / MARKER).write_text(json.dumps(marker, indent=1))
            place_folder(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def load_spec(directory: Path) -> ModelSpec:
    """Reads only the model's shape."""
    read_marker(directory)
    return ModelSpec.model_validate_json((directory / SPEC).read_bytes())


def load_checkpoint(directory: Path) -> Checkpoint:
    """Reads spec and weights and checks them against each other and the checksum."""
    opened = open_checkpoint(directory)
    weights = load_file(directory / WEIGHTS)
    return Checkpoint(
        spec=opened.spec,
        weights={name: weights[name] for name in weight_shapes(opened.spec)},
        metadata=opened.metadata,
        tokenizer_path=opened.tokenizer_path,
    )


def open_checkpoint(directory: Path) -> OpenCheckpoint:
    """Like `load_checkpoint`, but weights are read one at a time."""
    marker = read_marker(directory)
    seen = checksum_file(directory / WEIGHTS)
    if seen != marker["weights_xxh3_128"]:
        raise ValueError(
            f"{directory / WEIGHTS} has checksum {seen}, wanted {marker['weights_xxh3_128']}"
        )
    spec = load_spec(directory)
    files = TensorFiles.of([directory / WEIGHTS])
    check_shapes(spec, {name: header.shape for name, header in files.headers.items()})
    tokenizer = directory / TOKENIZER
    return OpenCheckpoint(
        spec=spec,
        read=files.fetch,
        metadata=marker["metadata"],
        tokenizer_path=tokenizer if tokenizer.exists() else None,
    )


def read_marker(directory: Path) -> dict[str, Any]:
    """Reads `checkpoint.json`, which is written last: without it there is no checkpoint. Puts back
    a checkpoint that a killed writer was about to replace.
    """
    put_back(directory)
    path = directory / MARKER
    if not path.exists():
        raise ValueError(f"{directory} holds no {MARKER}, wanted a finished checkpoint")
    return json.loads(path.read_bytes())


def checksum_file(path: Path) -> str:
    """Returns the xxh3-128 of a file in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
