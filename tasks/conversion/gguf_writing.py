"""GGUF file for llama.cpp of an exported model directory.

Names of tensors and fields are from gguf (extra `models`), row orders from llama.cpp's
convert_hf_to_gguf.py. One tensor is in memory at a time.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from tokenizers import Tokenizer
from torch import Tensor

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.published_models import CONFIG
from ostinato.models.checkpoint.store import TOKENIZER
from ostinato.models.checkpoint.streaming import TensorFiles
from ostinato.models.rendering.chat_template import find_template
from ostinato.models.rendering.special_tokens import end_ids
from ostinato.tasks.conversion.gguf_rotation import FACTORS, rotation_factors
from ostinato.tasks.conversion.gguf_splits import split_name

GGUF_FILE = "model.gguf"
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
}
# llama.cpp expects a qwen3_moe to have experts in every layer, with shares that sum to 1, and a
# glm4_moe to have one group of experts.
WANTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": []},
    "glm4_moe": {"n_group": 1},
}
ROTATIONS = ("default", "linear")
# llama.cpp reads a table of factors only for a llama
LLAMA_ROTATIONS = (*ROTATIONS, "llama3")
TYPES = {
    torch.float32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    torch.float16: (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
_SUFFIXES = (".weight", ".bias")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(.*)")
_ROUTER = ".mlp.gate.weight"  # llama.cpp reads it in fp32


@dataclass(frozen=True)
class GgufTensor:
    """A tensor with its name and row order in GGUF."""

    name: str
    rows: np.ndarray
    kind: GGMLQuantizationType


def check_gguf(config: Mapping[str, Any], tokenizer_file: Path) -> None:
    """Raises ConfigError if a model, by its published configuration and tokenizer, has no GGUF form."""
    if config["model_type"] not in ARCHITECTURES:
        raise ConfigError(
            f"a {config['model_type']} has no GGUF form here, wanted one of "
            f"{', '.join(ARCHITECTURES)}; without --gguf the directory is written"
        )
    for field, wanted in WANTED.get(config["model_type"], {}).items():
        if config[field] != wanted:
            raise ConfigError(
                f"{field} is {config[field]}, wanted {wanted} for GGUF; without --gguf the directory is "
                "written"
            )
    rotation = config["rope_parameters"]["rope_type"]
    known = LLAMA_ROTATIONS if config["model_type"] == "llama" else ROTATIONS
    if rotation not in known:
        raise ConfigError(
            f"rope_type {rotation!r} of a {config['model_type']} is not written as GGUF, wanted "
            f"{' or '.join(known)}; without --gguf the directory is written"
        )
    described = json.loads(tokenizer_file.read_bytes())
    model = described["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ConfigError(
            f"{tokenizer_file.name} is a {model['type']}, wanted byte-level BPE for GGUF"
        )
    split_name(described)


def write_gguf(directory: Path) -> Path:
    """Writes `model.gguf` into an exported directory. Raises ConfigError if the model has no GGUF form."""
    config = json.loads((directory / CONFIG).read_bytes())
    check_gguf(config, directory / TOKENIZER)
    architecture = ARCHITECTURES[config["model_type"]]
    path = directory / GGUF_FILE
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config)
    _add_tokens(writer, directory, config)
    files = TensorFiles.of(sorted(directory.glob("*.safetensors")))
    kind, file_type = TYPES[files.headers["model.embed_tokens.weight"].dtype]
    writer.add_file_type(file_type)
    for tensor in _tensors(files, config, architecture, kind):
        shape, nbytes = tensor.rows.shape, tensor.rows.nbytes
        writer.add_tensor_info(tensor.name, shape, tensor.rows.dtype, nbytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in _tensors(files, config, architecture, kind):
        writer.write_tensor_data(tensor.rows)
    writer.close()
    return path


def _tensors(
    files: TensorFiles,
    config: dict[str, Any],
    architecture: MODEL_ARCH,
    kind: GGMLQuantizationType,
) -> Iterator[GgufTensor]:
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    for source in sorted({_EXPERT.sub(r"\1.\3", name) for name in files.headers}):
        known = source.replace("score_correction_bias", "score_correction.bias")
        name = names.get_name(known, try_suffixes=_SUFFIXES)
        if name is None:
            raise ConfigError(f"tensor {source} has no name in a GGUF file of {architecture.name}")
        tensor = _fetch(files, source, config)
        if architecture is MODEL_ARCH.LLAMA:
            tensor = _pair_rows(source, tensor, config)
        is_kept = tensor.ndim == 1 or source.endswith(_ROUTER)
        kept = GGMLQuantizationType.F32 if is_kept else kind
        yield GgufTensor(name, quantize(tensor.float().numpy(), kept), kept)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        factors = rotation_factors(rope, config["head_dim"])
        yield GgufTensor(FACTORS, factors, GGMLQuantizationType.F32)


def _fetch(files: TensorFiles, source: str, config: dict[str, Any]) -> Tensor:
    """A tensor of the directory, or the stacked tensors of a layer's experts."""
    if source in files.headers:
        return files.fetch(source)
    layer, _, part = source.partition(".experts.")
    names = [f"{layer}.experts.{index}.{part}" for index in range(_num_experts(config))]
    return torch.stack([files.fetch(name) for name in names])


def _pair_rows(source: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Interleaves rows: llama.cpp rotates neighbouring rows of a head, Hugging Face those of its halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    field = heads.get(source.split(".")[-2])
    if field is None:
        return tensor
    split = tensor.reshape(config[field], 2, -1, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if "moe_intermediate_size" in config:
        _add_experts(writer, config)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    fraction = config.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(config["head_dim"] * fraction))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_experts(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(_num_experts(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "glm4_moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_nextn_predict_layers(0)


def _num_experts(config: Mapping[str, Any]) -> int:
    return config["num_experts"] if "num_experts" in config else config["n_routed_experts"]


def _add_tokens(writer: GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """Adds the tokenizer. Ids of the model that it does not use are marked as unused."""
    file = directory / TOKENIZER
    small = [*directory.glob("chat_template.*"), *directory.glob("*_config.json")]
    files = {path.name: path.read_bytes() for path in small}
    described = json.loads(file.read_bytes())
    model = described["model"]
    tokens = [f"[PAD{index}]" for index in range(config["vocab_size"])]
    types = [TokenType.UNUSED] * len(tokens)
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, TokenType.NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_name(described))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_token_merges(merges)
    begin = config.get("bos_token_id")
    if begin is not None:
        writer.add_bos_token_id(begin)
    first = end_ids({}, config)
    ends = sorted(end_ids(files, config), key=lambda token_id: token_id not in first)
    named = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token_id in zip(named, ends, strict=False):
        add(token_id)
    writer.add_add_bos_token(Tokenizer.from_file(str(file)).encode("a").ids[0] == begin)
    template = find_template(files)
    if template is not None:
        writer.add_chat_template(template)
