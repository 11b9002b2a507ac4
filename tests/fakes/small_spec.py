"""Model shapes small enough for tests."""

from ostinato.models.spec import ModelSpec


def make_spec(
    vocab_size: int,
    hidden_size: int,
    *,
    heads: tuple[int, int, int] = (4, 2, 16),
    experts: tuple[int, int, int] = (4, 2, 16),
    max_sequence_tokens: int = 96,
    num_layers: int = 2,
    drafts: tuple[int, int] = (0, 0),
) -> ModelSpec:
    """A shape with experts in every layer. `heads`: query heads, groups, width of a head; `experts`:
    number, per token, inner width; `drafts`: draft layers and their inner width.
    """
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        head_dim=heads[2],
        num_experts=experts[0],
        experts_per_token=experts[1],
        expert_hidden_size=experts[2],
        max_sequence_tokens=max_sequence_tokens,
        mtp_depth=drafts[0],
        mtp_hidden_size=drafts[1],
    )


# every feature on
SMALL_SPEC = make_spec(
    40, 32, heads=(2, 1, 16), experts=(4, 2, 32), max_sequence_tokens=64, drafts=(2, 24)
)
# fields of a shape with latent attention and YaRN
LATENT_OF_FOUR_HEADS = {
    "num_query_groups": 4,
    "head_dim": 10,
    "qk_norm": False,
    "latent": {
        "query_rank": 12,
        "key_value_rank": 8,
        "rotary_head_dim": 4,
        "value_head_dim": 6,
        "yarn": {"factor": 4.0, "original_tokens": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
