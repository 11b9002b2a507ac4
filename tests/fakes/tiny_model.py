"""A tiny model with random weights for tests of decoding, its logits far from uniform."""

import torch
from torch import Tensor

from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.spec import ModelSpec

TINY = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    num_experts=4,
    experts_per_token=2,
    expert_hidden_size=16,
    max_sequence_tokens=96,
    mtp_depth=2,
    mtp_hidden_size=16,
)


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Canonical weights of the right scale for activations near one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in spec.weight_shapes().items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("e_score_correction_bias"):
            weights[name] = 0.05 * noise
        elif name == "model.embed_tokens.weight":
            weights[name] = 0.6 * noise
        else:
            weights[name] = noise * shape[-1] ** -0.5
    return weights


def tiny_request(index: int) -> GenerateRequest:
    """Ten tokens of a session of its own."""
    return GenerateRequest(
        f"request-{index}", f"session-{index}", (1, 2, index % 32), 10, (), seed=index
    )
