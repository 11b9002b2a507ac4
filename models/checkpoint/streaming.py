"""Safetensors files read and written one tensor at a time.

A file is an 8-byte length, a JSON header and the tensors' bytes in the order of the header. A
writer that knows all shapes therefore holds only one tensor in memory.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
ALIGNMENT = 8


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path


class TensorFiles:
    """Tensors of one or several safetensors files by name, read on demand."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.headers = dict(headers)
        self._open: dict[Path, Any] = {}

    @classmethod
    def of(
        cls, paths: Iterable[Path], further: Mapping[str, torch.dtype] | None = None
    ) -> "TensorFiles":
        """All tensors of the files. Raises ValueError for a file that cannot be read or repeats a
        tensor. `further`: dtypes that are read but never written, by their safetensors names.
        """
        headers: dict[str, TensorHeader] = {}
        dtypes = {**_DTYPES, **(further or {})}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (not a mapping)
                        part = file.get_slice(name)
                        dtype = dtypes.get(part.get_dtype())
                        if dtype is None:
                            raise ValueError(
                                f"{path}: tensor {name} has dtype {part.get_dtype()}, wanted one of "
                                f"{', '.join(dtypes)}"
                            )
                        if name in headers:
                            raise ValueError(
                                f"{path}: tensor {name} is in {headers[name].path} too, wanted "
                                "it in one file; remove files that are not part of the model"
                            )
                        headers[name] = TensorHeader(tuple(part.get_shape()), dtype, path)
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}), wanted a whole safetensors file"
                ) from error
        return cls(headers)

    def fetch(self, name: str) -> Tensor:
        """Reads one tensor. Raises KeyError for an unknown name."""
        path = self.headers[name].path
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_tensor(name)


def write_tensors(
    path: Path,
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Writes tensors in the order of `layout`, which holds the shape and dtype of each."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in layout.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
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
                    f"tensor is {name} {tuple(tensor.shape)}, wanted {wanted} {shape} here"
                )
            flat = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
            flat.view(torch.uint8).numpy().tofile(stream)
