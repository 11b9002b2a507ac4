"""The shape of a model: every number that determines its weights and their computation."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ostinato.models.record import Record


class RopeBands(Record):
    """RoPE scaling of Llama 3: stretches long wavelengths, keeps short ones and blends those between."""

    factor: float = Field(gt=1, description="Factor that stretches long wavelengths.")
    low_frequency_factor: float = Field(gt=0, description="Bound of the long wavelengths.")
    high_frequency_factor: float = Field(gt=0, description="Bound of the short wavelengths.")
    original_tokens: int = Field(gt=0, description="Context that the model was pretrained at.")


class Yarn(Record):
    """YaRN (arXiv 2309.00071): keeps short wavelengths, stretches long ones and scales scores."""

    factor: float = Field(gt=1, description="Factor that stretches long wavelengths.")
    fast_turns: float = Field(
        default=32.0,
        gt=0,
        description="Turns over the original context; wavelengths with at least as many stay.",
    )
    slow_turns: float = Field(
        default=1.0,
        gt=0,
        description="Turns over the original context; wavelengths with fewer are fully stretched.",
    )
    original_tokens: int = Field(gt=0, description="Context that the model was pretrained at.")
    mscale: float = Field(
        default=0.0,
        ge=0,
        description="Scale of the rotated part as in `config.json`; 0: not given.",
    )
    mscale_all_dim: float = Field(
        default=0.0,
        ge=0,
        description="Scale of attention scores as in `config.json`; 0: not given.",
    )


class LatentAttention(Record):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int = Field(ge=0, description="Rank of the queries; 0: full.")
    key_value_rank: int = Field(gt=0, description="Rank of keys and values together.")
    rotary_head_dim: int = Field(gt=0)
    """Last columns of a query or key head that RoPE rotates; even."""
    value_head_dim: int = Field(gt=0, description="Width of a value head.")
    yarn: Yarn | None = Field(default=None, description="RoPE scaling; None: none.")


class ModelSpec(Record):
    """Decoder with grouped-query or latent attention: dense layers first, then layers of experts."""

    schema_version: Literal[1] = 1
    """Version of this table; 1 is the only one."""
    vocab_size: int = Field(gt=0, description="Rows of the embedding, special tokens included.")
    hidden_size: int = Field(gt=0, description="Width of the residual stream.")
    num_layers: int = Field(gt=0)
    """Transformer layers, each with attention and an MLP or experts."""
    num_attention_heads: int = Field(gt=0, description="Query heads of a layer.")
    num_query_groups: int = Field(gt=0)
    """Key/value heads of a layer; divides the query heads."""
    head_dim: int = Field(gt=0, description="Width of one head; even, because RoPE rotates halves.")
    latent: LatentAttention | None = None
    """Latent attention; None: grouped queries."""
    num_dense_layers: int = Field(default=0, ge=0)
    """First layers that have one SwiGLU MLP instead of experts."""
    dense_hidden_size: int = Field(default=0, ge=0)
    """Inner width of that MLP; > 0 if num_dense_layers > 0."""
    num_experts: int = Field(default=0, ge=0)
    """Experts of a layer; 0 if all layers are dense."""
    experts_per_token: int = Field(default=0, ge=0)
    """Experts that process each token (top-k)."""
    expert_hidden_size: int = Field(default=0, ge=0)
    """Inner width of one SwiGLU expert."""
    shared_expert_hidden_size: int = Field(default=0, ge=0)
    """Inner width of the expert that sees every token; 0: none."""
    router_score: Literal["sigmoid", "softmax"] = "sigmoid"
    """Scores of experts; only sigmoid has a balancing bias."""
    router_normalizes: bool = True
    """Whether the shares of the chosen experts sum to 1."""
    router_scale: float = Field(default=1.0, gt=0, description="Factor of the experts' shares.")
    router_groups: int = Field(default=1, gt=0)
    """Groups of experts; divides num_experts."""
    router_groups_per_token: int = Field(default=1, gt=0)
    """Number of best groups from which a token's experts are chosen."""
    qk_norm: bool = Field(default=True, description="RMSNorm on each query and key head.")
    qkv_bias: bool = Field(default=False, description="Bias of queries, keys and values.")
    tied_embeddings: bool = True
    """Whether the embedding is also the output matrix."""
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """Leading part of a head that RoPE rotates."""
    rope_bands: RopeBands | None = None
    """RoPE scaling by wavelength; None: none."""
    rope_base: float = Field(default=10_000.0, gt=1)
    """Base period of the rotary embedding."""
    rope_scaling_factor: float = Field(default=1.0, ge=1)
    """Divisor of positions; 1: unchanged."""
    max_sequence_tokens: int = Field(gt=0, description="Longest context the model is used at.")
    mtp_depth: int = Field(default=0, ge=0)
    """Draft layers beside the trunk; 0 means none."""
    mtp_hidden_size: int = Field(default=0, ge=0)
    """Inner width of a draft layer; > 0 if mtp_depth > 0."""
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
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} must not exceed "
                f"num_layers={self.num_layers}"
            )
        if (self.num_dense_layers > 0) != (self.dense_hidden_size > 0):
            raise ValueError(
                f"dense_hidden_size={self.dense_hidden_size} must be > 0 exactly when "
                f"num_dense_layers={self.num_dense_layers} is"
            )
        self._check_experts()
        self._check_latent()
        rotated = self.head_dim * self.rotary_fraction
        if rotated != int(rotated) or int(rotated) % 2:
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} is {rotated}, "
                "wanted an even whole number"
            )
        if self.mtp_depth > 0 and self.mtp_hidden_size == 0:
            raise ValueError(f"mtp_hidden_size must be > 0 when mtp_depth={self.mtp_depth}")
        return self

    def _check_experts(self) -> None:
        has_experts = self.num_moe_layers > 0
        for name in ("num_experts", "experts_per_token", "expert_hidden_size"):
            if (getattr(self, name) > 0) != has_experts:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be > 0 exactly when some of "
                    f"num_layers={self.num_layers} are not dense "
                    f"(num_dense_layers={self.num_dense_layers})"
                )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must not exceed "
                f"num_experts={self.num_experts}"
            )
        groups, chosen = self.router_groups, self.router_groups_per_token
        if self.num_experts % groups or chosen > groups:
            raise ValueError(
                f"router_groups={groups} must divide num_experts={self.num_experts} and be at "
                f"least router_groups_per_token={chosen}"
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        only = {
            "num_query_groups": self.num_attention_heads,
            "qk_norm": False,
            "qkv_bias": False,
            "rotary_fraction": 1.0,
            "rope_bands": None,
            "rope_scaling_factor": 1.0,
        }
        for name, wanted in only.items():
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}, wanted {wanted!r} with latent attention"
                )
        rotary = self.latent.rotary_head_dim
        if rotary % 2 or rotary >= self.head_dim:
            raise ValueError(
                f"latent.rotary_head_dim={rotary} must be even and less than "
                f"head_dim={self.head_dim}"
            )
        if self.latent.value_head_dim > self.head_dim:
            raise ValueError(
                f"latent.value_head_dim={self.latent.value_head_dim} must not exceed "
                f"head_dim={self.head_dim}"
            )

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, the last ones."""
        return self.num_layers - self.num_dense_layers

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_query_groups * self.head_dim

    @property
    def mixed_size(self) -> int:
        """Width of the attention's output before its last projection."""
        width = self.head_dim if self.latent is None else self.latent.value_head_dim
        return self.num_attention_heads * width

    @property
    def cached_size(self) -> int:
        """Numbers per token in one layer's KV cache."""
        if self.latent is None:
            return 2 * self.key_value_size
        return self.latent.key_value_rank + self.latent.rotary_head_dim
