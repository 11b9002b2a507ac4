"""A model shape small enough for unit tests, with every feature on."""

from ostinato.models.spec import ModelSpec

SMALL_SPEC = ModelSpec(
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=2,
    num_query_groups=1,
    head_dim=16,
    num_experts=4,
    experts_per_token=2,
    expert_hidden_size=32,
    max_sequence_tokens=64,
    mtp_depth=2,
    mtp_hidden_size=24,
)
