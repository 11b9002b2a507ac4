"""Named model shapes.

The large shapes are grouped-query stand-ins: where the original uses another attention (MLA) or
shared experts, the preset keeps the widths and says so.
"""

from ostinato.models.spec import ModelSpec

NANO = ModelSpec(
    vocab_size=1280,
    hidden_size=128,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=32,
    num_experts=8,
    experts_per_token=2,
    expert_hidden_size=128,
    max_sequence_tokens=512,
    mtp_depth=2,
    mtp_hidden_size=256,
)

QWEN3_30B_A3B = ModelSpec(
    vocab_size=151_936,
    hidden_size=2048,
    num_layers=48,
    num_attention_heads=32,
    num_query_groups=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_hidden_size=768,
    rope_base=1_000_000.0,
    max_sequence_tokens=262_144,
    mtp_depth=1,
    mtp_hidden_size=6144,
)

# Kimi K2 has MLA, one shared expert and one dense layer; this keeps its widths.
KIMI_K2 = ModelSpec(
    vocab_size=163_840,
    hidden_size=7168,
    num_layers=61,
    num_attention_heads=64,
    num_query_groups=8,
    head_dim=128,
    num_experts=384,
    experts_per_token=8,
    expert_hidden_size=2048,
    rope_base=50_000.0,
    rope_scaling_factor=32.0,
    max_sequence_tokens=131_072,
    mtp_depth=1,
    mtp_hidden_size=18_432,
)

PRESETS: dict[str, ModelSpec] = {"nano": NANO, "qwen3_30b_a3b": QWEN3_30B_A3B, "kimi_k2": KIMI_K2}


def find_preset(name: str) -> ModelSpec:
    """Returns the shape called `name`."""
    if name not in PRESETS:
        raise ValueError(f"unknown model preset {name!r}, wanted one of {sorted(PRESETS)}")
    return PRESETS[name]
