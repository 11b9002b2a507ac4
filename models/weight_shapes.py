"""Names and shapes of a model's canonical weights."""

import math
from collections.abc import Mapping

from ostinato.models.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(spec: ModelSpec) -> Shapes:
    """All weights, in file order."""
    hidden = spec.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.input_layernorm.weight": (hidden,)}
        shapes |= _attention_shapes(spec, f"{prefix}.self_attn")
        shapes |= {f"{prefix}.post_attention_layernorm.weight": (hidden,)}
        mlp_shapes = _dense_shapes if layer < spec.num_dense_layers else _moe_shapes
        shapes |= mlp_shapes(spec, f"{prefix}.mlp")
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for depth in range(spec.mtp_depth):
        shapes |= _draft_shapes(spec, f"model.mtp.{depth}")
    return shapes


def num_parameters(spec: ModelSpec) -> int:
    """Elements of all weights."""
    return sum(math.prod(shape) for shape in weight_shapes(spec).values())


def attention_parameters(spec: ModelSpec) -> int:
    """Elements of the matrices of one layer's attention."""
    shapes = _attention_shapes(spec, "").values()
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def check_shapes(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses weights whose names or shapes differ from those of the spec."""
    wanted = weight_shapes(spec)
    missing, unknown = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"weights do not fit the spec: missing {missing[:5]}, unknown {unknown[:5]}"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"weight {name} has shape {shapes[name]}, wanted {shape}")


def _attention_shapes(spec: ModelSpec, prefix: str) -> Shapes:
    """Weights of one layer's attention, below `prefix`."""
    if spec.latent is not None:
        return _latent_shapes(spec, prefix)
    sizes = {"q": spec.query_size, "k": spec.key_value_size, "v": spec.key_value_size}
    shapes: Shapes = {
        f"{prefix}.{part}_proj.weight": (rows, spec.hidden_size) for part, rows in sizes.items()
    }
    if spec.qkv_bias:
        shapes |= {f"{prefix}.{part}_proj.bias": (rows,) for part, rows in sizes.items()}
    shapes[f"{prefix}.o_proj.weight"] = (spec.hidden_size, spec.query_size)
    if spec.qk_norm:
        shapes[f"{prefix}.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}.k_norm.weight"] = (spec.head_dim,)
    return shapes


def _latent_shapes(spec: ModelSpec, prefix: str) -> Shapes:
    latent = spec.latent
    assert latent is not None
    heads, hidden = spec.num_attention_heads, spec.hidden_size
    inner, rank = latent.query_rank, latent.key_value_rank
    shapes: Shapes = {}
    if inner:
        shapes |= {
            f"{prefix}.q_a_proj.weight": (inner, hidden),
            f"{prefix}.q_a_layernorm.weight": (inner,),
            f"{prefix}.q_b_proj.weight": (spec.query_size, inner),
        }
    else:
        shapes[f"{prefix}.q_proj.weight"] = (spec.query_size, hidden)
    plain = spec.head_dim - latent.rotary_head_dim
    return shapes | {
        f"{prefix}.kv_a_proj_with_mqa.weight": (rank + latent.rotary_head_dim, hidden),
        f"{prefix}.kv_a_layernorm.weight": (rank,),
        f"{prefix}.kv_b_proj.weight": (heads * (plain + latent.value_head_dim), rank),
        f"{prefix}.o_proj.weight": (hidden, spec.mixed_size),
    }


def _dense_shapes(spec: ModelSpec, prefix: str) -> Shapes:
    return {
        f"{prefix}.gate_up_proj.weight": (2 * spec.dense_hidden_size, spec.hidden_size),
        f"{prefix}.down_proj.weight": (spec.hidden_size, spec.dense_hidden_size),
    }


def _moe_shapes(spec: ModelSpec, prefix: str) -> Shapes:
    hidden, experts, inner = spec.hidden_size, spec.num_experts, spec.expert_hidden_size
    shapes: Shapes = {f"{prefix}.gate.weight": (experts, hidden)}
    if spec.router_score == "sigmoid":
        shapes[f"{prefix}.gate.e_score_correction_bias"] = (experts,)
    shapes[f"{prefix}.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
    shapes[f"{prefix}.experts.down_proj"] = (experts, hidden, inner)
    if spec.shared_expert_hidden_size:
        shared = spec.shared_expert_hidden_size
        shapes[f"{prefix}.shared_experts.gate_up_proj.weight"] = (2 * shared, hidden)
        shapes[f"{prefix}.shared_experts.down_proj.weight"] = (hidden, shared)
    return shapes


def _draft_shapes(spec: ModelSpec, prefix: str) -> Shapes:
    hidden, inner = spec.hidden_size, spec.mtp_hidden_size
    return {
        f"{prefix}.hidden_norm.weight": (hidden,),
        f"{prefix}.embed_norm.weight": (hidden,),
        f"{prefix}.in_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.mlp_norm.weight": (hidden,),
        f"{prefix}.gate_up_proj.weight": (2 * inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
        f"{prefix}.norm.weight": (hidden,),
    }
