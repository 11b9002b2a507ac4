"""Which experts a token gets."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.models.network.routing import LIVE_ROUTE, choose_experts

SCORES_NE = torch.tensor([[0.9, 0.8, 0.7, 0.1]])
NO_BIAS_E = torch.zeros(4)


def chosen(replay: list[int] | None, ratio: float, bias_E: torch.Tensor = NO_BIAS_E) -> set[int]:
    replay_NK = None if replay is None else torch.tensor([replay])
    return set(choose_experts(SCORES_NE, bias_E, 2, replay_NK, ratio)[0].tolist())


def test_choose_experts_takes_the_best_by_score_plus_bias() -> None:
    assert chosen(None, 0.0) == {0, 1}
    assert chosen(None, 0.0, torch.tensor([0.0, 0.0, 0.3, 0.0])) == {0, 2}


def test_choose_experts_replays_a_plausible_expert() -> None:
    assert chosen([2, 0], 0.8) == {2, 0}


def test_choose_experts_replaces_an_implausible_expert_by_its_own_candidate() -> None:
    assert chosen([3, 2], 0.5) == {2, 0}
    assert chosen([3, 2], 0.0) == {3, 2}


def test_choose_experts_fills_live_positions_by_itself() -> None:
    assert chosen([LIVE_ROUTE, LIVE_ROUTE], 0.5) == {0, 1}
    assert chosen([2, LIVE_ROUTE], 0.5) == {2, 0}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1))
def test_choose_experts_always_gives_different_experts_and_keeps_plausible_ones(
    seed: int, ratio: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_NE = torch.rand(6, 5, generator=generator)
    replay_NK = torch.randint(-1, 5, (6, 2), generator=generator)
    experts_NK = choose_experts(scores_NE, torch.zeros(5), 2, replay_NK, ratio)
    assert (experts_NK[:, 0] != experts_NK[:, 1]).all()
    floor_N = ratio * scores_NE.topk(2).values[:, -1]
    for row in range(6):
        for expert in replay_NK[row].tolist():
            if expert != LIVE_ROUTE and scores_NE[row, expert] >= floor_N[row]:
                assert expert in experts_NK[row]
