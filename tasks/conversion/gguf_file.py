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

import torch
import transformers
from gguf import GGUFReader, Keys
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ostinato.infra.platform.errors import ConfigError, boundary

PRETOKENIZER = "tokenizer.ggml.pre"
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
        reader = GGUFReader(path)
        pretokenizer = reader.get_field(PRETOKENIZER)
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        architecture = reader.get_field(Keys.General.ARCHITECTURE)
        assert architecture is not None  # transformers has read it
        for name, pattern in WIDTHS.items():
            width = reader.get_field(pattern.format(arch=architecture.contents()))
            if width is not None:
                setattr(config, name, int(width.contents()))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
    if pretokenizer is not None and pretokenizer.contents() == "smollm":
        # digits stand alone, which transformers does not read from the file
        split = Tokenizer.from_str(files["tokenizer.json"].decode())
        split.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        files["tokenizer.json"] = split.to_str().encode()
    fields = config.to_dict()
    files["generation_config.json"] = json.dumps(
        {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ).encode()
    # without what transformers adds to every configuration
    plain = {name: value for name, value in fields.items() if not name.startswith("_")}
    return GgufModel(plain, dict(_single_experts(read["tensors"])), files)


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
