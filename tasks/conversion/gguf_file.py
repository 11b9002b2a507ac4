"""A GGUF file as tensors in fp32, fields of `config.json`, tokenizer and chat template.

Names, row orders and block formats of GGUF are known to transformers and gguf (extra `models`). All
tensors are in memory at once.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, Keys, ReaderField
from tokenizers import Tokenizer
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.tasks.conversion.gguf_splits import SPLITS, with_split

KNOWN = ("llama", "qwen2", "qwen3", "qwen3moe")
# Fields of the configuration that transformers does not read for all families, each with a pattern of the
# architecture's name.
WIDTHS = {
    "head_dim": Keys.Attention.KEY_LENGTH,
    "moe_intermediate_size": Keys.LLM.EXPERT_FEED_FORWARD_LENGTH,
}
MAGIC = b"GGUF"


@dataclass(frozen=True)
class GgufModel:
    """Content of one file."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, bytes]


def read_gguf(path: Path) -> GgufModel:
    """Reads the file. ConfigError when it is cut, damaged or of an architecture nobody knows."""
    with path.open("rb") as stream:
        magic = stream.read(len(MAGIC))
    if magic != MAGIC:
        raise ConfigError(f"{path} begins with {magic!r}, wanted {MAGIC!r}: it is no GGUF file")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with boundary(ConfigError, f"GGUF file {path} cannot be read; wanted a whole file"):
        reader = _WholeReader(path)
        named = {name: _text(reader, name) for name in (Keys.Tokenizer.MODEL, Keys.Tokenizer.PRE)}
        architecture = _text(reader, Keys.General.ARCHITECTURE)
        if architecture not in KNOWN:
            raise ConfigError(
                f"{path}: {Keys.General.ARCHITECTURE} = {architecture!r}, wanted one of "
                f"{', '.join(KNOWN)}"
            )
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        for name, pattern in WIDTHS.items():
            width = reader.get_field(pattern.format(arch=architecture))
            if width is not None:
                setattr(config, name, int(width.contents()))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
    files["tokenizer.json"] = _with_named_split(files["tokenizer.json"], named, path)
    fields = config.to_dict()
    files["generation_config.json"] = json.dumps(
        {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ).encode()
    # without what transformers adds to every configuration
    plain = {name: value for name, value in fields.items() if not name.startswith("_")}
    return GgufModel(plain, dict(_single_experts(read["tensors"])), files)


class _WholeReader(GGUFReader):
    """Reader that names the tensor at which a file was cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            of_block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            size = int(np.prod(dims)) * bytes_of_block // of_block
            end = int(start_offs + offset[0]) + size
            if end > len(self.data):
                raise ConfigError(
                    f"GGUF file {self._path} cannot be read; wanted a whole file: it has {len(self.data)} "
                    f"bytes, wanted {end} for the end of tensor {bytes(name).decode()}"
                )
        super()._build_tensors(start_offs, fields)


def _text(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _with_named_split(tokenizer: bytes, named: dict[str, Any], path: Path) -> bytes:
    """A byte-level tokenizer with the splitting that the file names, which transformers does not read."""
    if named[Keys.Tokenizer.MODEL] != "gpt2":
        return tokenizer
    name = named[Keys.Tokenizer.PRE]
    if name not in SPLITS:
        raise ConfigError(
            f"{path}: {Keys.Tokenizer.PRE} = {name!r}, wanted one of {', '.join(SPLITS)}: how texts "
            "are split is not guessed"
        )
    described = json.dumps(with_split(json.loads(tokenizer), name))
    return Tokenizer.from_str(described).to_str().encode()


def _single_experts(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as safetensors files name them: transformers holds the experts of a layer as one."""
    for name, tensor in tensors.items():
        layer, found, part = name.partition(".experts.")
        if not found:
            yield name, tensor
            continue
        for index, expert in enumerate(tensor):
            pieces = {part: expert}
            if part == "gate_up_proj":
                gate, up = expert.chunk(2)
                pieces = {"gate_proj": gate, "up_proj": up}
            for piece, values in pieces.items():
                yield f"{layer}.experts.{index}.{piece}.weight", values
