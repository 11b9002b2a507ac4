"""The shape of a model, as one record.

`ModelSpec`: every number that decides which weights exist and what they compute. It builds nothing
and imports no tensor library.
"""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ModelSpec(BaseModel):
    """Decoder with grouped-query attention, experts in every layer and tied embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    vocab_size: int = Field(
        gt=0, description="Rows of the shared embedding, special tokens included."
    )
    hidden_size: int = Field(gt=0, description="Width of the residual stream.")
    num_layers: int = Field(
        gt=0, description="Transformer layers, each with attention and experts."
    )
    num_attention_heads: int = Field(gt=0, description="Query heads of a layer.")
    num_query_groups: int = Field(
        gt=0, description="Key/value heads of a layer; divides the query heads."
    )
    head_dim: int = Field(gt=0, description="Width of one head; even, because RoPE rotates halves.")
    num_experts: int = Field(gt=0, description="Experts of a layer.")
    experts_per_token: int = Field(gt=0, description="Experts that process each token (top-k).")
    expert_hidden_size: int = Field(gt=0, description="Inner width of one SwiGLU expert.")
    rope_base: float = Field(
        default=10_000.0, gt=1, description="Base period of the rotary embedding."
    )
    rope_scaling_factor: float = Field(
        default=1.0, ge=1, description="Positions are divided by it; 1 leaves them as they are."
    )
    max_sequence_tokens: int = Field(gt=0, description="Longest context the model is used at.")
    mtp_depth: int = Field(
        default=0, ge=0, description="Draft layers beside the trunk; 0 means none."
    )
    mtp_hidden_size: int = Field(
        default=0, ge=0, description="Inner width of a draft layer; > 0 if mtp_depth > 0."
    )
    norm_epsilon: float = Field(default=1e-6, gt=0, description="Epsilon inside every RMSNorm.")

    @model_validator(mode="after")
    def check_shapes(self) -> Self:
        """Refuses numbers that no weights can satisfy."""
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups={self.num_query_groups} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates halves")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must not exceed "
                f"num_experts={self.num_experts}"
            )
        if self.mtp_depth > 0 and self.mtp_hidden_size == 0:
            raise ValueError(f"mtp_hidden_size must be > 0 when mtp_depth={self.mtp_depth}")
        return self

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_query_groups * self.head_dim

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the canonical weights, in file order."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (self.query_size, hidden),
                f"{prefix}.self_attn.k_proj.weight": (self.key_value_size, hidden),
                f"{prefix}.self_attn.v_proj.weight": (self.key_value_size, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, self.query_size),
                f"{prefix}.self_attn.q_norm.weight": (self.head_dim,),
                f"{prefix}.self_attn.k_norm.weight": (self.head_dim,),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate.weight": (self.num_experts, hidden),
                f"{prefix}.mlp.gate.e_score_correction_bias": (self.num_experts,),
                f"{prefix}.mlp.experts.gate_up_proj": (
                    self.num_experts,
                    2 * self.expert_hidden_size,
                    hidden,
                ),
                f"{prefix}.mlp.experts.down_proj": (
                    self.num_experts,
                    hidden,
                    self.expert_hidden_size,
                ),
            }
        shapes["model.norm.weight"] = (hidden,)
        for depth in range(self.mtp_depth):
            prefix = f"model.mtp.{depth}"
            shapes |= {
                f"{prefix}.hidden_norm.weight": (hidden,),
                f"{prefix}.embed_norm.weight": (hidden,),
                f"{prefix}.in_proj.weight": (hidden, 2 * hidden),
                f"{prefix}.mlp_norm.weight": (hidden,),
                f"{prefix}.gate_up_proj.weight": (2 * self.mtp_hidden_size, hidden),
                f"{prefix}.down_proj.weight": (hidden, self.mtp_hidden_size),
                f"{prefix}.norm.weight": (hidden,),
            }
        return shapes

    def num_parameters(self) -> int:
        """Elements of all weights."""
        total = 0
        for shape in self.weight_shapes().values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total


def check_shapes(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses weights whose names or shapes differ from those of the spec."""
    wanted = spec.weight_shapes()
    missing, unknown = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"weights do not fit the spec: missing {missing[:5]}, unknown {unknown[:5]}"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"weight {name} has shape {shapes[name]}, wanted {shape}")
