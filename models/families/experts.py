"""Families with experts: qwen3_moe (softmax router) and glm4_moe (sigmoid router, shared expert)."""

from collections.abc import Mapping
from typing import Any

from ostinato.models.families.config_fields import ConfigFields
from ostinato.models.families.family import Family
from ostinato.models.families.shared_fields import read_shared, write_shared
from ostinato.models.spec import ModelSpec

GLM4_MOE_DEFAULTS = {
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def _read_qwen3_moe(fields: ConfigFields) -> ModelSpec:
    shared = read_shared(fields)
    fields.expect("attention_bias", False, False)
    fields.expect("decoder_sparse_step", 1, 1)
    fields.expect("use_sliding_window", False, False)
    fields.take("sliding_window", None)  # has no effect without use_sliding_window
    dense = sorted(fields.numbers("mlp_only_layers"))
    if dense != list(range(len(dense))):
        raise ValueError(
            f"config.json (qwen3_moe): mlp_only_layers = {dense}, only the first layers can be dense"
        )
    inner = fields.take("intermediate_size", 0)
    experts = fields.take("num_experts", None) or fields.count("num_local_experts")
    fields.take("num_local_experts", None)
    return ModelSpec(
        **shared,
        num_dense_layers=len(dense),
        dense_hidden_size=inner if dense else 0,
        num_experts=experts,
        experts_per_token=fields.take("num_experts_per_tok"),
        expert_hidden_size=fields.take("moe_intermediate_size"),
        router_score="softmax",
        router_normalizes=fields.take("norm_topk_prob", False),
    )


def _write_qwen3_moe(spec: ModelSpec) -> dict[str, Any] | None:
    is_plain = spec.qk_norm and not spec.qkv_bias and spec.rotary_fraction == 1
    is_flat = spec.router_groups_per_token == spec.router_groups and spec.router_scale == 1
    has_shared = spec.shared_expert_hidden_size > 0
    if not spec.num_moe_layers or spec.router_score != "softmax" or has_shared:
        return None
    if not (is_plain and is_flat):
        return None
    return write_shared(spec) | {
        "intermediate_size": spec.dense_hidden_size or spec.expert_hidden_size,
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_hidden_size,
        "norm_topk_prob": spec.router_normalizes,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(spec.num_dense_layers)),
    }


def _read_glm4_moe(fields: ConfigFields) -> ModelSpec:
    shared = read_shared(fields, rotary_fraction=0.5, norm_epsilon=1e-5)
    return ModelSpec(
        **shared,
        **read_grouped_experts(fields, GLM4_MOE_DEFAULTS),
        qk_norm=fields.take("use_qk_norm", False),
        qkv_bias=fields.take("attention_bias", False),
    )


def read_grouped_experts(fields: ConfigFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelSpec` for routed and shared experts and a router over groups, as glm4_moe and
    deepseek_v3 name them. `defaults` holds the values of fields that the family's files may omit.
    """

    def count(name: str) -> int:
        return fields.count(name, *([defaults[name]] if name in defaults else []))

    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if fields.take(name, 0):
            fields.count(name)  # draft layers are not read: ours have another form
    dense = fields.take("first_k_dense_replace", defaults["first_k_dense_replace"])
    inner, dense_inner = count("moe_intermediate_size"), count("intermediate_size")
    # 0 shared experts are allowed
    num_shared = fields.take("n_shared_experts", 1) and fields.count("n_shared_experts", 1)
    return {
        "num_dense_layers": dense,
        "dense_hidden_size": dense_inner if dense else 0,
        "num_experts": count("n_routed_experts"),
        "experts_per_token": count("num_experts_per_tok"),
        "expert_hidden_size": inner,
        "shared_expert_hidden_size": inner * num_shared,
        "router_normalizes": fields.take("norm_topk_prob", True),
        "router_scale": fields.take("routed_scaling_factor", defaults["routed_scaling_factor"]),
        "router_groups": count("n_group"),
        "router_groups_per_token": count("topk_group"),
    }


def write_grouped_experts(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of `read_grouped_experts`."""
    inner = spec.expert_hidden_size
    return {
        "moe_intermediate_size": inner,
        "first_k_dense_replace": spec.num_dense_layers,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": spec.shared_expert_hidden_size // inner,
        "num_experts_per_tok": spec.experts_per_token,
        "norm_topk_prob": spec.router_normalizes,
        "routed_scaling_factor": spec.router_scale,
        "n_group": spec.router_groups,
        "topk_group": spec.router_groups_per_token,
        "num_nextn_predict_layers": 0,
    }


def _write_glm4_moe(spec: ModelSpec) -> dict[str, Any] | None:
    inner = spec.expert_hidden_size
    if not spec.num_moe_layers or spec.router_score != "sigmoid":
        return None
    if spec.shared_expert_hidden_size % inner or spec.tied_embeddings:
        return None
    fields = write_shared(spec)
    fields["rope_parameters"]["partial_rotary_factor"] = spec.rotary_fraction
    return fields | {
        "partial_rotary_factor": spec.rotary_fraction,
        "intermediate_size": spec.dense_hidden_size or inner,
        "attention_bias": spec.qkv_bias,
        "use_qk_norm": spec.qk_norm,
        **write_grouped_experts(spec),
    }


def _widen_glm4_moe(spec: ModelSpec) -> ModelSpec:
    """The shape with a shared expert and an untied output matrix, which the family always has."""
    shared = spec.shared_expert_hidden_size or spec.expert_hidden_size
    return spec.model_copy(update={"shared_expert_hidden_size": shared, "tied_embeddings": False})


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe)
GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", _read_glm4_moe, _write_glm4_moe, _widen_glm4_moe
)
