"""A model of ours as a Hugging Face directory that vLLM and transformers load.

GLM-4-MoE computes exactly what our models compute: sigmoid router scores with a correction bias for
the choice, shares over the chosen ones, norms on query and key heads; the shared expert it wants is
written as zeros. Qwen3-MoE has the same shapes and weights but a softmax router without the bias:
equal in cost, not in result. Draft layers stay out: their form is ours.
"""

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ostinato.models.spec import ModelSpec


class Architecture(StrEnum):
    """Architecture fields of an exported directory."""

    GLM4_MOE = "glm4_moe"  # the same function
    QWEN3_MOE = "qwen3_moe"  # the same shapes and cost, another router


def write_model_directory(
    directory: Path,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    architecture: Architecture = Architecture.GLM4_MOE,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes the two files. A tokenizer is not among them: token ids go in and out."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.float32 if "e_score_correction" in name else dtype).contiguous()
        for name, tensor in public_tensors(spec, weights, architecture)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    settings = public_config(spec, architecture) | {"torch_dtype": str(dtype).split(".")[-1]}
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    return directory


def public_tensors(
    spec: ModelSpec, weights: Mapping[str, Tensor], architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as the architecture's checkpoints have them: one matrix an expert."""
    for name in spec.weight_shapes():
        tensor = weights[name]
        if name.startswith("model.mtp."):
            continue
        if name.endswith("e_score_correction_bias") and architecture is Architecture.QWEN3_MOE:
            continue
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, matrix in enumerate(tensor):
                yield f"{prefix}{expert}.down_proj.weight", matrix
            if architecture is Architecture.GLM4_MOE:
                shared = prefix.removesuffix("experts.") + "shared_experts."
                for part in ("gate_proj", "up_proj"):
                    yield f"{shared}{part}.weight", torch.zeros_like(tensor[0].t())
                yield f"{shared}down_proj.weight", torch.zeros_like(tensor[0])
        else:
            yield name, tensor
    if architecture is Architecture.GLM4_MOE:  # vLLM's does not share the embedding
        yield "lm_head.weight", weights["model.embed_tokens.weight"].clone()


def public_config(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    """The fields of `config.json`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_base}
    if spec.rope_scaling_factor > 1:
        rope |= {"rope_type": "linear", "factor": spec.rope_scaling_factor}
    common: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.expert_hidden_size,
        "moe_intermediate_size": spec.expert_hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_query_groups,
        "head_dim": spec.head_dim,
        "num_experts_per_tok": spec.experts_per_token,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": spec.norm_epsilon,
        "max_position_embeddings": spec.max_sequence_tokens,
        "rope_theta": spec.rope_base,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if architecture is Architecture.QWEN3_MOE:
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "rope_parameters": rope,
            "num_experts": spec.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return common | {
        "tie_word_embeddings": False,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "rope_parameters": rope | {"partial_rotary_factor": 1.0},
        "partial_rotary_factor": 1.0,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    }
