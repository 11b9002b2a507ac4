"""Laws of rows whose common beginnings are computed once: the same numbers as row by row, from fewer tokens."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.models.network.attention.prefixes import (
    PrefixTree,
    build_tree,
    find_prefixes,
    number_nodes,
)
from ostinato.models.network.build import TrainerModel, build_trainer_model, recompute_layers
from ostinato.models.spec import LatentAttention, ModelSpec
from tests.fakes.small_spec import make_spec

MOE = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=512, num_layers=3).model_copy(
    update={"num_dense_layers": 1, "dense_hidden_size": 48, "shared_expert_hidden_size": 16}
)

Rows = list[list[int]]


def grow(seed: int, num_rows: int, longest: int) -> Rows:
    """Rows that branch off one another at drawn places, some of them whole beginnings of others."""
    generator = np.random.default_rng(seed)
    rows: Rows = []
    for _ in range(num_rows):
        row: list[int] = []
        if rows and generator.random() < 0.8:
            other = rows[generator.integers(len(rows))]
            row = other[: generator.integers(1, len(other) + 1)]
        fresh = int(generator.integers(0 if row else 1, longest + 1))
        rows.append([*row, *generator.integers(0, MOE.vocab_size, fresh).tolist()][:longest])
    return rows


def lay_out(rows: Rows, fillers: int = 0) -> tuple[Tensor, Tensor, PrefixTree, list[int]]:
    """Sorted rows as a padded batch, its tree, and the rows' places in the list given."""
    order, shared = find_prefixes([np.array(row) for row in rows])
    ordered = [rows[index] for index in order]
    longest = max(map(len, rows))
    tokens_BT = np.zeros((len(rows), longest), dtype=np.int64)
    padding_BT = np.ones((len(rows), longest), dtype=bool)
    for place, row in enumerate(ordered):
        tokens_BT[place, : len(row)] = row
        padding_BT[place, : len(row)] = False
    nodes_BT = number_nodes([len(row) for row in ordered], shared, longest)
    tree = build_tree(nodes_BT, padding_BT, int(nodes_BT.max()) + 1 + fillers)
    return torch.from_numpy(tokens_BT), torch.from_numpy(padding_BT), tree, order


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 90))
@settings(deadline=None, max_examples=60)
def test_a_tree_has_each_beginning_once_and_gives_every_place_its_own(
    seed: int, num_rows: int, longest: int
) -> None:
    rows = grow(seed, num_rows, longest)
    tokens_BT, padding_BT, tree, order = lay_out(rows, fillers=3)
    assert sorted(order) == list(range(num_rows))
    beginnings = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert tree.num_nodes == len(beginnings) + 3
    assert int(tree.is_filler_N.sum()) == 3
    of_nodes_1N, is_filler_1N, _ = tree.pick(tokens_BT, None)
    assert torch.equal(is_filler_1N[0], tree.is_filler_N)
    states_N12 = torch.stack((of_nodes_1N[0], tree.positions_N), -1)[:, None].float()
    rows_TB2 = tree.spread(states_N12)
    is_real_TB = ~padding_BT.T
    assert torch.equal(rows_TB2[..., 0][is_real_TB], tokens_BT.T[is_real_TB].float())
    positions_TB = torch.arange(len(rows_TB2))[:, None].expand(-1, num_rows).float()
    assert torch.equal(rows_TB2[..., 1][is_real_TB], positions_TB[is_real_TB])


LATENT = make_spec(40, 32, heads=(4, 4, 12), max_sequence_tokens=512).model_copy(
    update={
        "latent": LatentAttention(
            query_rank=16, key_value_rank=8, rotary_head_dim=4, value_head_dim=8
        ),
    }
)


def test_rows_of_nothing_share_nothing() -> None:
    rows = [np.zeros((length, 2), dtype=np.int32) for length in (3, 0, 0, 2)]
    assert find_prefixes(rows) == ([1, 2, 3, 0], [0, 0, 0, 2])
    assert find_prefixes([]) == ([], [])


def run(model: TrainerModel, score: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logprobs_BT = score()
    weights_BT = torch.linspace(-1, 1, logprobs_BT.numel()).view_as(logprobs_BT)
    (logprobs_BT * weights_BT).sum().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return logprobs_BT.detach(), gradients


@pytest.mark.parametrize("spec", [MOE, LATENT], ids=["grouped heads", "latent heads"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("longest", [40, 300])
def test_a_tree_gives_the_log_probabilities_and_gradients_of_its_rows(
    spec: ModelSpec, recomputes: bool, longest: int
) -> None:
    model = build_trainer_model(spec, seed=3)
    recompute_layers(model, recomputes)
    tokens_BT, padding_BT, tree, _ = lay_out(grow(7, 9, longest), fillers=5)
    mask_BT = ~padding_BT
    routes_BTLK = _routes(spec, tree)
    options = {"padding_BT": padding_BT, "mask_BT": mask_BT, "plausibility_ratio": 0.0}
    by_row, wanted = run(model, lambda: model.token_logprobs(tokens_BT, routes_BTLK, **options))
    counted = int(model.routers.counts_LE()[0].sum())
    model.routers.balance(model.routers.counts_LE(), 0.0)
    once, gradients = run(
        model, lambda: model.token_logprobs(tokens_BT, routes_BTLK, tree=tree, **options)
    )
    # sums in another order, positions rotate alike
    torch.testing.assert_close(once, by_row, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], atol=2e-5, rtol=1e-4, msg=name)
    assert counted == int(mask_BT.sum()) * spec.experts_per_token
    seen = int(model.routers.counts_LE()[0].sum())
    assert seen == (tree.num_nodes - 5) * spec.experts_per_token < counted


def _routes(spec: ModelSpec, tree: PrefixTree) -> Tensor:
    """Drawn experts, alike where rows share a node."""
    generator = torch.Generator().manual_seed(6)
    shape = (tree.num_nodes, spec.num_moe_layers, spec.num_experts)
    routes_NLK = torch.rand(shape, generator=generator).topk(spec.experts_per_token).indices
    return routes_NLK.to(torch.int16)[tree.nodes_TB.T]


def test_a_batch_of_padding_passes_through() -> None:
    model = build_trainer_model(MOE, seed=3)
    padding_BT = np.ones((2, 16), dtype=bool)
    tree = build_tree(np.zeros((2, 16), dtype=np.int64), padding_BT, 64)
    tokens_BT = torch.zeros(2, 16, dtype=torch.int64)
    assert torch.isfinite(model.forward_hidden(tokens_BT, tree=tree)).all()
    assert not model.routers.counts_LE().any()
