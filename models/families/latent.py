"""Families with latent attention and experts: deepseek_v3 (V3, V3.1, R1) and kimi_k2, its copy."""

from typing import Any

from ostinato.models.families.config_fields import ConfigFields
from ostinato.models.families.experts import read_grouped_experts, write_grouped_experts
from ostinato.models.families.family import Family
from ostinato.models.families.shared_fields import write_rope
from ostinato.models.spec import LatentAttention, ModelSpec, Yarn

# Router fields that both families publish with these values.
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
# Fields that only training uses.
UNUSED = ("aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "qk_head_dim")
DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}


def _read(fields: ConfigFields) -> ModelSpec:
    fields.expect("attention_bias", False, False)
    fields.expect("rope_interleave", True, True)
    for name, wanted in ROUTER.items():
        fields.expect(name, wanted, wanted)
    for name in UNUSED:
        fields.take(name, None)
    heads, rotary = fields.count("num_attention_heads"), fields.count("qk_rope_head_dim", 64)
    fields.expect("num_key_value_heads", heads, heads)
    fields.expect("head_dim", rotary, rotary)  # transformers writes it so
    max_tokens = fields.count("max_position_embeddings", 4096)
    rope = fields.rope(max_tokens, with_yarn=True)
    yarn: Yarn | None = rope.pop("yarn", None)
    return ModelSpec(
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_query_groups=heads,
        head_dim=fields.count("qk_nope_head_dim", 128) + rotary,
        latent=LatentAttention(
            query_rank=0 if fields.is_null("q_lora_rank") else fields.count("q_lora_rank", 1536),
            key_value_rank=fields.count("kv_lora_rank", 512),
            rotary_head_dim=rotary,
            value_head_dim=fields.count("v_head_dim", 128),
            yarn=yarn,
        ),
        **read_grouped_experts(fields, DEFAULTS),
        qk_norm=False,
        tied_embeddings=fields.take("tie_word_embeddings", False),
        max_sequence_tokens=max_tokens,
        norm_epsilon=fields.take("rms_norm_eps", 1e-6),
        **rope,
    )


def _write(spec: ModelSpec) -> dict[str, Any] | None:
    latent, inner = spec.latent, spec.expert_hidden_size
    if latent is None or not spec.num_moe_layers or spec.router_score != "sigmoid":
        return None
    if spec.shared_expert_hidden_size % inner:
        return None
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_attention_heads,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.key_value_rank,
        "qk_nope_head_dim": spec.head_dim - latent.rotary_head_dim,
        "qk_rope_head_dim": latent.rotary_head_dim,
        "v_head_dim": latent.value_head_dim,
        "max_position_embeddings": spec.max_sequence_tokens,
        "rms_norm_eps": spec.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        "intermediate_size": spec.dense_hidden_size or inner,
        **write_grouped_experts(spec),
        **ROUTER,
        **write_rope(spec, _scaling(latent.yarn)),
    }


def _scaling(yarn: Yarn | None) -> dict[str, Any]:
    if yarn is None:
        return {"rope_type": "default"}
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "beta_fast": yarn.fast_turns,
        "beta_slow": yarn.slow_turns,
        "original_max_position_embeddings": yarn.original_tokens,
        **{name: value for name, value in scales.items() if value},
    }


def _widen(spec: ModelSpec) -> ModelSpec:
    """The shape with a shared expert, which the family always has."""
    shared = spec.shared_expert_hidden_size or spec.expert_hidden_size
    return spec.model_copy(update={"shared_expert_hidden_size": shared})


ARCHITECTURE = "DeepseekV3ForCausalLM"
DEEPSEEK_V3 = Family("deepseek_v3", ARCHITECTURE, _read, _write, _widen, has_latent_attention=True)
# Read under its own name, but written as deepseek_v3, which every engine supports.
KIMI_K2 = Family("kimi_k2", ARCHITECTURE, _read, lambda _: None, _widen, has_latent_attention=True)
