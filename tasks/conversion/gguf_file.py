"""A GGUF file as tensors in fp32, fields of `config.json`, tokenizer and chat template.

transformers and gguf (extra `models`) know the names, row orders and block formats of GGUF. A
tensor is read and converted to fp32 on demand, stacked experts one by one.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFEndian,
    GGUFReader,
    GGUFValueType,
    Keys,
    ReaderField,
    dequantize,
)
from gguf.quants import quant_shape_to_byte_shape
from tokenizers import Tokenizer
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.models.checkpoint.streaming import TensorHeader
from ostinato.tasks.conversion.gguf_rotation import FACTORS, read_scaling, with_factors
from ostinato.tasks.conversion.gguf_splits import SPLITS, with_split
from ostinato.tasks.conversion.sources import PublishedModel

KNOWN = ("llama", "qwen2", "qwen3", "qwen3moe")
# Fields that transformers does not read for all families, with their GGUF keys.
WIDTHS = {
    "head_dim": Keys.Attention.KEY_LENGTH,
    "moe_intermediate_size": Keys.LLM.EXPERT_FEED_FORWARD_LENGTH,
}
MAGIC = b"GGUF"
_FURTHER_ENDS = (Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
_END_TEXTS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>")
) | {"<end_of_turn>", "</s>"}
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_MAX_EXPERTS = 4096  # of a layer
_COMPARED_ROWS = 1024  # of embedding and output matrix
_OUTLIERS = 0.01  # share of values that importance-weighted blocks may round further
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def read_gguf(path: Path, place: str) -> PublishedModel:
    """Reads the file's header. Raises ConfigError for a cut or damaged file or unknown architecture."""
    with path.open("rb") as stream:
        magic = stream.read(len(MAGIC))
    if magic != MAGIC:
        raise ConfigError(f"{path} begins with {magic!r}, wanted {MAGIC!r}: it is not a GGUF file")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with boundary(ConfigError, f"GGUF file {path} cannot be read; wanted a whole file"):
        reader = _NamingReader(path)
        if reader.endianess is not GGUFEndian.LITTLE:
            raise ConfigError(f"{path} is a big-endian GGUF file, wanted a little-endian one")
        named = {name: _text(reader, name) for name in (Keys.Tokenizer.MODEL, Keys.Tokenizer.PRE)}
        architecture = _text(reader, Keys.General.ARCHITECTURE)
        if architecture not in KNOWN:
            raise ConfigError(
                f"{path}: {Keys.General.ARCHITECTURE} = {architecture!r}, wanted one of "
                f"{', '.join(KNOWN)}"
            )
        _check_layers(path, reader, architecture)
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        for name, pattern in WIDTHS.items():
            width = reader.get_field(pattern.format(arch=architecture))
            if width is not None:
                setattr(config, name, int(width.contents()))
        tensors = _Tensors(path, reader, architecture, config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
    files["tokenizer.json"] = _with_named_split(files["tokenizer.json"], named, path)
    fields = config.to_dict()
    rope = read_scaling(path, reader, architecture, fields["rope_parameters"])
    if architecture == "llama" and FACTORS in tensors.headers:
        factors = tensors.fetch(FACTORS).numpy()
        rope = with_factors(path, rope, factors, config.head_dim)
        del tensors.headers[FACTORS]
    fields["rope_parameters"] = rope
    named_ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ends = _ends(reader, Tokenizer.from_str(files["tokenizer.json"].decode()))
    files["generation_config.json"] = json.dumps(
        named_ids | ({"eos_token_id": ends} if ends else {})
    ).encode()
    note = tensors.tie_copies()
    if note:
        fields["tie_word_embeddings"] = True
    # without the private fields that transformers adds to every configuration
    plain = {name: value for name, value in fields.items() if not name.startswith("_")}
    return PublishedModel(place, plain, tensors.headers, tensors.fetch, files, note)


def _check_layers(path: Path, reader: GGUFReader, architecture: str) -> None:
    """Raises ConfigError for more layers or experts than tensors can hold, of which a model is built."""
    limits = {Keys.LLM.BLOCK_COUNT: len(reader.tensors), Keys.LLM.EXPERT_COUNT: _MAX_EXPERTS}
    for pattern, most in limits.items():
        name = pattern.format(arch=architecture)
        seen = _text(reader, name)
        if seen is not None and not (isinstance(seen, int) and seen <= most):
            raise ConfigError(f"{path}: {name} = {seen!r:.80}, wanted at most {most}")


class _NamingReader(GGUFReader):
    """Reader whose errors name the tensor at which a file was cut, or with an unreadable form."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """Reads like the base class, but refuses to read beyond the end of the file."""
        self._want(offset, int(count) * np.dtype(dtype).itemsize)
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:  # an item has a byte or more
            self._want(orig_offs, int(self._get(orig_offs + 4, np.uint64)[0]))
        return super()._get_field_parts(orig_offs, raw_type)

    def _want(self, offset: int, num_bytes: int) -> None:
        left = max(len(self.data) - offset, 0)
        if num_bytes > left:
            raise ConfigError(
                f"GGUF file {self._path} cannot be read; wanted a whole file: at byte {offset} at least "
                f"{num_bytes} bytes should follow, and {left} do"
            )

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            what = f"tensor {bytes(name).decode()}"
            if kind[0] not in _READABLE:
                known = GGMLQuantizationType
                seen = known(kind[0]).name if kind[0] in set(known) else kind[0]
                wanted = ", ".join(kind.name for kind in _READABLE)
                raise ConfigError(
                    f"{self._path}: {what} is stored as {seen}, wanted one of {wanted}"
                )
            form = GGMLQuantizationType(kind[0])
            of_block, bytes_of_block = GGML_QUANT_SIZES[form]
            shape = dims.tolist()
            if shape[0] % of_block:
                raise ConfigError(
                    f"{self._path}: {what} has rows of {shape[0]} values, wanted a multiple of "
                    f"{of_block}, the block of {form.name}"
                )
            end = start_offs + int(offset[0]) + prod(shape) // of_block * bytes_of_block
            if end > len(self.data):
                raise ConfigError(
                    f"GGUF file {self._path} cannot be read; wanted a whole file: it has {len(self.data)} "
                    f"bytes, wanted {end} for the end of {what}"
                )
        super()._build_tensors(start_offs, fields)


def _is_readable(kind: GGMLQuantizationType) -> bool:
    """Whether gguf can dequantise blocks of this form."""
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


_READABLE = tuple(kind for kind in GGMLQuantizationType if _is_readable(kind))


@dataclass(frozen=True)
class _Stored:
    """Offset and form of a tensor's blocks in the file."""

    name: str  # in GGUF
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    def experts(self) -> Iterator["_Stored"]:
        """The tensors that are stacked in this one."""
        size = prod(self.byte_shape[1:])
        for index in range(self.shape[0]):
            yield _Stored(self.name, self.kind, self.shape[1:], self.start + index * size)

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return quant_shape_to_byte_shape(self.shape, self.kind)

    @property
    def bits(self) -> int:
        """Bits per value, without those of a block's scale."""
        of_block, bytes_of_block = GGML_QUANT_SIZES[self.kind]
        return 8 * bytes_of_block // of_block

    def every(self, path: Path, step: int) -> np.ndarray:
        """Every `step`-th row as fp32."""
        blocks = np.memmap(path, np.uint8, "r", self.start, self.byte_shape)
        return dequantize(np.ascontiguousarray(blocks[::step]), self.kind)


class _Tensors:
    """Tensors of a file by their published names."""

    def __init__(
        self,
        path: Path,
        reader: GGUFReader,
        architecture: str,
        config: transformers.PreTrainedConfig,
    ) -> None:
        self._path = path
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config.to_dict())
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        names = get_gguf_hf_weights_map(model, self._processor)
        self._stored: dict[str, _Stored] = {}
        for tensor in reader.tensors:
            stem = tensor.name.removesuffix(".weight")  # the map's names of stacked experts
            name = names.get(tensor.name) or names.get(stem) or tensor.name
            shape = tuple(reversed(tensor.shape.tolist()))
            stored = _Stored(tensor.name, tensor.tensor_type, shape, tensor.data_offset)
            self._stored.update(_published(name, stored))
        self.headers = {
            name: TensorHeader(stored.shape, torch.float32, path)
            for name, stored in self._stored.items()
        }

    def tie_copies(self) -> str:
        """Ties an output matrix that is a copy of the embedding, and keeps the finer form. A copy
        differs by no more than rounding, which is a step of the coarser form in each block. Returns
        a line for the user. Empty: they differ, or there is no output matrix.
        """
        embedding, output = self._stored.get(_EMBEDDING), self._stored.get(_OUTPUT)
        if embedding is None or output is None or embedding.shape != output.shape:
            return ""
        finer, coarser = sorted((embedding, output), key=lambda one: one.bits, reverse=True)
        step = -(-embedding.shape[0] // _COMPARED_ROWS)
        of_block = GGML_QUANT_SIZES[coarser.kind][0]
        rows, rounded = (
            one.every(self._path, step).reshape(-1, of_block) for one in (finer, coarser)
        )
        step_N1 = np.abs(rows).max(axis=1, keepdims=True) / 2 ** (coarser.bits - 1)
        if np.mean(np.abs(rows - rounded) > step_N1) > _OUTLIERS:
            return ""
        self._stored[_EMBEDDING] = finer
        for tensors in (self._stored, self.headers):
            del tensors[_OUTPUT]
        return (
            f"{output.name} ({output.kind.name}) is a copy of {embedding.name} ({embedding.kind.name}): "
            f"one tied matrix, from {finer.kind.name}"
        )

    def fetch(self, name: str) -> Tensor:
        """Reads one tensor. Raises KeyError for an unknown name."""
        stored = self._stored[name]
        with boundary(ConfigError, f"{self._path}: tensor {stored.name} cannot be read"):
            shape = stored.byte_shape
            blocks = np.fromfile(self._path, np.uint8, prod(shape), offset=stored.start)
            rows = dequantize(blocks.reshape(shape), stored.kind)
            return torch.from_numpy(self._processor.process(rows, stored.name).weights)


def _published(name: str, stored: _Stored) -> Iterator[tuple[str, _Stored]]:
    """A tensor under its names in safetensors files, which have one tensor per expert."""
    layer, found, _ = name.partition(".experts.")
    if not found:
        yield name, stored
        return
    part = _EXPERTS[stored.name.split(".")[-2]]
    for index, expert in enumerate(stored.experts()):
        yield f"{layer}.experts.{index}.{part}.weight", expert


def _text(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _ends(reader: GGUFReader, tokenizer: Tokenizer) -> list[int]:
    """Ids that end an answer. The format has fields for at most three of them, so other ends are
    found by their texts, as in llama.cpp.
    """
    named = (_text(reader, key) for key in (Keys.Tokenizer.EOS_ID, *_FURTHER_ENDS))
    by_text = (
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content in _END_TEXTS
    )
    found = [int(token_id) for token_id in named if token_id is not None]
    return list(dict.fromkeys([*found, *sorted(by_text)]))


def _with_named_split(tokenizer: bytes, named: dict[str, Any], path: Path) -> bytes:
    """A byte-level tokenizer with the pre-tokenizer that the file names, which transformers ignores."""
    if named[Keys.Tokenizer.MODEL] != "gpt2":
        return tokenizer
    name = named[Keys.Tokenizer.PRE]
    if name not in SPLITS:
        raise ConfigError(
            f"{path}: {Keys.Tokenizer.PRE} = {name!r}, wanted one of {', '.join(SPLITS)}: the "
            "pre-tokenizer is not guessed"
        )
    described = json.dumps(with_split(json.loads(tokenizer), name))
    return Tokenizer.from_str(described).to_str().encode()
