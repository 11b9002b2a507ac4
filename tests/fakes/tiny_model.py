"""A tiny model with random weights for tests of decoding, its logits far from uniform."""

import torch
from torch import Tensor

from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import weight_shapes
from tests.fakes.small_spec import make_spec

TINY = make_spec(32, 16, drafts=(2, 16))


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Canonical weights of the right scale for activations near one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
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
