"""Recomputed layers: the same numbers, tokens counted once, little kept for backward."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ostinato.models.network.adapters import attach_adapters
from ostinato.models.network.build import TrainerModel, build_trainer_model, recompute_layers
from tests.fakes.small_spec import make_spec

# a dense layer and two with experts
SPEC = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=64, num_layers=3).model_copy(
    update={"num_dense_layers": 1, "dense_hidden_size": 48, "shared_expert_hidden_size": 16}
)


class Seen(NamedTuple):
    """What a pass leaves: log-probabilities, gradients, tokens per expert, replay counts, bytes kept."""

    logprobs_BT: Tensor
    gradients: dict[str, Tensor]
    counts_LE: Tensor
    replayed: tuple[int, int]
    kept_bytes: int


def run(model: TrainerModel, routes_BTLK: Tensor | None) -> Seen:
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(0, SPEC.vocab_size, (4, 48), generator=generator)
    padding_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    padding_BT[0, 40:] = True
    model.routers.balance(model.routers.counts_LE(), 0.0)
    model.zero_grad()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TBD = model.forward_hidden(
            tokens_BT, routes_BTLK, padding_BT=padding_BT, plausibility_ratio=0.5
        )
    logprobs_BT, _ = model.score_hidden(hidden_TBD, tokens_BT)
    (logprobs_BT * torch.linspace(-1, 1, logprobs_BT.numel()).view_as(logprobs_BT)).sum().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Seen(
        logprobs_BT.detach(),
        gradients,
        model.routers.counts_LE().clone(),
        model.routers.take_replay_counts(),
        sum(kept.values()),
    )


def draw_routes() -> Tensor:
    generator = torch.Generator().manual_seed(6)
    scores = torch.rand(4, 48, SPEC.num_moe_layers, SPEC.num_experts, generator=generator)
    return scores.topk(SPEC.experts_per_token).indices.to(torch.int16)


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("is_replayed", [False, True])
def test_recomputed_layers_give_the_same_numbers(is_replayed: bool, has_adapters: bool) -> None:
    model = build_trainer_model(SPEC, seed=3)
    if has_adapters:
        attach_adapters(model, rank=2, alpha=4.0, seed=0)
    routes_BTLK = draw_routes() if is_replayed else None
    plain = run(model, routes_BTLK)
    recompute_layers(model, True)
    again = run(model, routes_BTLK)

    assert torch.equal(again.logprobs_BT, plain.logprobs_BT)
    assert again.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.equal(again.gradients[name], gradient), name
    assert torch.equal(again.counts_LE, plain.counts_LE)
    assert again.counts_LE.sum(-1).tolist() == [(4 * 48 - 8) * SPEC.experts_per_token] * 2
    assert again.replayed == plain.replayed
    assert (again.replayed[0] > 0) == is_replayed


def test_recomputed_layers_keep_little_for_backward() -> None:
    model = build_trainer_model(SPEC, seed=3)
    plain = run(model, None)
    recompute_layers(model, True)
    assert run(model, None).kept_bytes < 0.2 * plain.kept_bytes
    recompute_layers(model, False)
    assert run(model, None).kept_bytes == plain.kept_bytes
