"""The trainer model: weights in and out, determinism, replay, masks."""

import pytest
import torch

from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.weight_shapes import weight_shapes
from tests.fakes.small_spec import SMALL_SPEC


@pytest.fixture(scope="module")
def model() -> TrainerModel:
    return build_trainer_model(SMALL_SPEC, seed=1)


def draw_tokens(rows: int = 3, length: int = 19) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, SMALL_SPEC.vocab_size, (rows, length), generator=generator)


def draw_routes(tokens_BT: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    scores = torch.rand(
        *tokens_BT.shape, SMALL_SPEC.num_layers, SMALL_SPEC.num_experts, generator=generator
    )
    return scores.topk(SMALL_SPEC.experts_per_token).indices.to(torch.int16)


def test_weights_survive_export_and_import_bit_by_bit(model: TrainerModel) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator)
        for name, shape in weight_shapes(SMALL_SPEC).items()
    }
    other = build_trainer_model(SMALL_SPEC, seed=2)
    other.import_weights(weights)
    exported = other.export_weights()
    assert list(exported) == list(weight_shapes(SMALL_SPEC))
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_exported_weights_do_not_share_memory_with_the_model() -> None:
    model = build_trainer_model(SMALL_SPEC, seed=2)
    before = model.export_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    after = model.export_weights()
    assert not any(
        torch.equal(before[name], after[name]) for name in before if not name.endswith("bias")
    )


def test_import_weights_of_another_shape_is_refused(model: TrainerModel) -> None:
    weights = model.export_weights()
    weights["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        model.import_weights(weights)


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    first = build_trainer_model(SMALL_SPEC, seed=3).export_weights()
    assert torch.equal(torch.rand(1), expected)
    second = build_trainer_model(SMALL_SPEC, seed=3).export_weights()
    other = build_trainer_model(SMALL_SPEC, seed=4).export_weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_layout_of_more_ranks_than_groups_is_refused(model: TrainerModel) -> None:
    with pytest.raises(ValueError, match="open for 1 ranks, wanted 2"):
        build_trainer_model(SMALL_SPEC, 2)


def test_masked_logprobs_equal_the_chosen_ones_with_equal_gradients(model: TrainerModel) -> None:
    tokens_BT = draw_tokens()
    mask_BT = torch.rand(tokens_BT.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    parameters = list(model.trunk.parameters())
    masked_BT = model.token_logprobs(tokens_BT, mask_BT=mask_BT)
    grads = torch.autograd.grad(masked_BT.sum(), parameters)
    whole_BT = model.token_logprobs(tokens_BT) * mask_BT
    wanted = torch.autograd.grad(whole_BT.sum(), parameters)
    torch.testing.assert_close(masked_BT, whole_BT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads, wanted, atol=1e-4, rtol=1e-4)


def test_replayed_routes_are_the_ones_used(model: TrainerModel) -> None:
    tokens_BT = draw_tokens()
    routes_BTLK = draw_routes(tokens_BT)
    model.routers.counts_LE()
    model.routers.balance(torch.zeros(SMALL_SPEC.num_layers, SMALL_SPEC.num_experts), rate=0.0)
    model.forward_hidden(tokens_BT, routes_BTLK, plausibility_ratio=0.0)
    used_LE = model.routers.counts_LE()
    for layer in range(SMALL_SPEC.num_layers):
        wanted = torch.bincount(
            routes_BTLK[:, :, layer].reshape(-1).long(), minlength=SMALL_SPEC.num_experts
        )
        assert torch.equal(used_LE[layer], wanted.float())
    assert model.routers.take_replay_counts()[1] == 0


def test_routes_are_those_of_layers_with_experts_alone() -> None:
    dense = {"num_layers": 3, "num_dense_layers": 1, "dense_hidden_size": 48}
    model = build_trainer_model(SMALL_SPEC.model_copy(update=dense), seed=1)
    tokens_BT = draw_tokens()
    routes_BTLK = draw_routes(tokens_BT)  # of two layers
    model.forward_hidden(tokens_BT, routes_BTLK, plausibility_ratio=0.0)
    for layer, used_E in enumerate(model.routers.counts_LE()):
        chosen_N = routes_BTLK[:, :, layer].reshape(-1).long()
        assert torch.equal(used_E, chosen_N.bincount(minlength=SMALL_SPEC.num_experts).float())
    with pytest.raises(
        ValueError, match=r"routes have \[layers, experts\] \(1, 2\), wanted \(2, 2\)"
    ):
        model.forward_hidden(tokens_BT, routes_BTLK[:, :, :1])


def test_live_routes_equal_no_replay(model: TrainerModel) -> None:
    tokens_BT = draw_tokens()
    live = torch.full((*tokens_BT.shape, SMALL_SPEC.num_layers, SMALL_SPEC.experts_per_token), -1)
    with torch.no_grad():
        torch.testing.assert_close(
            model.token_logprobs(tokens_BT, live),
            model.token_logprobs(tokens_BT),
            atol=1e-6,
            rtol=1e-6,
        )


def test_routes_of_another_shape_are_refused(model: TrainerModel) -> None:
    tokens_BT = draw_tokens()
    with pytest.raises(ValueError, match=r"\(1, 2\), wanted"):
        model.token_logprobs(tokens_BT, torch.zeros(*tokens_BT.shape, 1, 2))


def test_balancing_raises_the_bias_of_idle_experts_and_ignores_padding() -> None:
    model = build_trainer_model(SMALL_SPEC, seed=5)
    tokens_BT = draw_tokens()
    padding_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    padding_BT[1:] = True
    model.forward_hidden(tokens_BT, padding_BT=padding_BT)
    counts_LE = model.routers.counts_LE()
    assert (counts_LE.sum(1) == tokens_BT.shape[1] * SMALL_SPEC.experts_per_token).all()
    model.routers.balance(counts_LE, rate=0.25)
    bias_E = model.export_weights()["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias_E, 0.25 * torch.sign(counts_LE[0].mean() - counts_LE[0]))
    assert not model.routers.counts_LE().any()
