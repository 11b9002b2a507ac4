"""The model's formulae in plain torch, without Megatron: what every implementation must agree with.

A spec and canonical weights in, logits of one row of tokens out. Slow and simple on purpose.

Shapes: T tokens, V vocabulary, D model width, N heads, H head width, E experts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.moe.reference import expert_mlp_reference
from ostinato.models.spec import ModelSpec


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(heads_TNH: Tensor, spec: ModelSpec) -> Tensor:
    half = spec.head_dim // 2
    frequencies = spec.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    positions = torch.arange(heads_TNH.shape[0], dtype=torch.float64) / spec.rope_scaling_factor
    angles = (positions[:, None] * frequencies).to(heads_TNH.dtype)[:, None]
    left, right = heads_TNH[..., :half], heads_TNH[..., half:]
    turned = (
        left * angles.cos() - right * angles.sin(),
        right * angles.cos() + left * angles.sin(),
    )
    return torch.cat(turned, dim=-1)


def attend(hidden_TD: Tensor, layer: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    def heads(part: str) -> Tensor:
        return (hidden_TD @ layer[f"self_attn.{part}_proj.weight"].T).view(
            len(hidden_TD), -1, spec.head_dim
        )

    query = rotate(rms_norm(heads("q"), layer["self_attn.q_norm.weight"], spec.norm_epsilon), spec)
    key = rotate(rms_norm(heads("k"), layer["self_attn.k_norm.weight"], spec.norm_epsilon), spec)
    repeats = spec.num_attention_heads // spec.num_query_groups
    key, value = key.repeat_interleave(repeats, 1), heads("v").repeat_interleave(repeats, 1)
    scores_NTT = torch.einsum("tnh,snh->nts", query, key) * spec.head_dim**-0.5
    future = torch.ones(len(hidden_TD), len(hidden_TD), dtype=torch.bool).triu(1)
    attention = scores_NTT.masked_fill(future, float("-inf")).softmax(-1)
    mixed = torch.einsum("nts,snh->tnh", attention, value).flatten(1)
    return mixed @ layer["self_attn.o_proj.weight"].T


def mix_experts(hidden_TD: Tensor, layer: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    scores_TE = torch.sigmoid(hidden_TD @ layer["mlp.gate.weight"].T)
    experts = torch.topk(
        scores_TE + layer["mlp.gate.e_score_correction_bias"], spec.experts_per_token
    ).indices
    weights = scores_TE.gather(-1, experts)
    weights = weights / weights.sum(-1, keepdim=True)
    gate_up, down = layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"]
    return expert_mlp_reference(hidden_TD, experts, weights, gate_up, down)


def plain_hidden(tokens_T: Tensor, weights: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    """Returns hidden_TD after the final norm."""
    hidden_TD = weights["model.embed_tokens.weight"][tokens_T]
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        layer = {
            name.removeprefix(prefix): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        normed = rms_norm(hidden_TD, layer["input_layernorm.weight"], spec.norm_epsilon)
        hidden_TD = hidden_TD + attend(normed, layer, spec)
        normed = rms_norm(hidden_TD, layer["post_attention_layernorm.weight"], spec.norm_epsilon)
        hidden_TD = hidden_TD + mix_experts(normed, layer, spec)
    return rms_norm(hidden_TD, weights["model.norm.weight"], spec.norm_epsilon)


def plain_logits(tokens_T: Tensor, weights: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    """Returns logits_TV."""
    return plain_hidden(tokens_T, weights, spec) @ weights["model.embed_tokens.weight"].T


def plain_draft(
    state_D: Tensor, next_token: int, weights: Mapping[str, Tensor], depth: int, spec: ModelSpec
) -> tuple[Tensor, Tensor]:
    """Returns (state for the next depth, logits_V) of draft layer `depth`."""
    prefix, embed = f"model.mtp.{depth}.", weights["model.embed_tokens.weight"]
    part = {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    epsilon = spec.norm_epsilon
    joined = torch.cat(
        (
            rms_norm(state_D, part["hidden_norm.weight"], epsilon),
            rms_norm(embed[next_token], part["embed_norm.weight"], epsilon),
        )
    )
    state_D = part["in_proj.weight"] @ joined
    gate, up = (
        part["gate_up_proj.weight"] @ rms_norm(state_D, part["mlp_norm.weight"], epsilon)
    ).chunk(2)
    state_D = state_D + part["down_proj.weight"] @ (functional.silu(gate) * up)
    return state_D, embed @ rms_norm(state_D, part["norm.weight"], epsilon)
