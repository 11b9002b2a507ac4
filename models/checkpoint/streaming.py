"""Safetensors files read and written one tensor at a time.

A file is an 8-byte length, a JSON header and the tensors' bytes in the order of the header, so a
writer that knows all shapes needs no tensor in memory but the one it writes.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ALIGNMENT = 8


class TensorFiles:
    """Tensors of one or several safetensors files by name, read when they are asked for."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self.places = dict(places)
        self._open: dict[Path, safe_open] = {}

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "TensorFiles":
        """Every tensor of the files. ValueError names a file that cannot be read."""
        places: dict[str, Path] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    places |= dict.fromkeys(file.keys(), path)
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}), wanted a whole safetensors file"
                ) from error
        return cls(places)

    def fetch(self, name: str) -> Tensor:
        """One tensor. ValueError when it is in no file or not in floats."""
        path = self.places.get(name)
        if path is None:
            files = sorted({place.name for place in self.places.values()})
            raise ValueError(f"tensor {name} is in none of the files {files}")
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        tensor = self._open[path].get_tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{path}: tensor {name} is {tensor.dtype}, wanted float32, bfloat16 or float16"
            )
        return tensor


def write_tensors(
    path: Path,
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Writes tensors in the order of `layout`, which says shape and dtype of each."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in layout.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for (wanted, (shape, dtype)), (name, tensor) in zip(layout.items(), tensors, strict=True):
            if name != wanted or tuple(tensor.shape) != shape:
                raise ValueError(
                    f"tensor {name} {tuple(tensor.shape)} comes where {wanted} {shape} is wanted"
                )
            flat = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
            stream.write(memoryview(flat.view(torch.uint8).numpy()))
