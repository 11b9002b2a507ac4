"""GGUF files with other tensors than an export has."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, dequantize

# Stored rows and their form, by a tensor's name and its rows in fp32. None leaves it out.
Change = Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType] | None]


def as_they_are(_: str, rows: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    """The change that changes nothing."""
    return rows, GGMLQuantizationType.F32


def rewrite_gguf(
    source: Path, target: Path, change: Change = as_they_are, more: Mapping[str, np.ndarray] = {}
) -> None:
    """Copies a file with the same fields and other tensors, `more` behind them."""
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        kind = field.types[0]
        inner = field.types[-1] if kind is GGUFValueType.ARRAY else None
        if field.name != Keys.General.ARCHITECTURE and not field.name.startswith("GGUF."):
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        changed = change(tensor.name, dequantize(tensor.data, tensor.tensor_type))
        if changed is not None:
            rows, stored_as = changed
            writer.add_tensor(tensor.name, np.ascontiguousarray(rows), raw_dtype=stored_as)
    for name, rows in more.items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
