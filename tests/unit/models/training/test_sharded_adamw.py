"""AdamW over two ranks: each keeps its part of the state, and the weights are those of one rank."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.training.optimizer import CombinedOptimizer, build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig
from tests.fakes.small_spec import make_spec

# a dense layer and a layer of experts
SPEC = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=64).model_copy(
    update={"num_dense_layers": 1, "dense_hidden_size": 48}
)
CONFIG = OptimizerConfig(kind="adamw")


class Seen(NamedTuple):
    """Weights and the optimiser's whole state after some steps, and elements of state that the rank holds."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    held: int


def take_steps(model: TrainerModel, optimizer: CombinedOptimizer, seeds: range) -> None:
    """Steps of the same gradients on every rank."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for _, whole in sorted(model.named_parameters()):
            if whole.requires_grad:
                whole.grad = torch.randn(whole.shape, generator=generator)
        optimizer.step()


def train(given: tuple[dict[str, Any] | None, range], rank: int) -> tuple[Seen, list[int]]:
    """Steps after a state (None: from the start)."""
    state, seeds = given
    model = build_trainer_model(SPEC, torch.distributed.get_world_size(), seed=1)
    optimizer = build_optimizer(model, CONFIG)
    if state is not None:
        optimizer.load_state_dict(state)
    take_steps(model, optimizer, seeds)
    held = sum(one.tensor.numel() for one in optimizer.states() if one.tensor.ndim)
    counts = torch.zeros(torch.distributed.get_world_size())
    counts[rank] = held
    torch.distributed.all_reduce(counts)
    seen = Seen(model.export_weights(), optimizer.state_dict(), held)
    return seen, [int(count) for count in counts]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


@pytest.fixture(scope="module")
def alone() -> Seen:
    return run_ranks(train, (None, range(3)), ParallelLayout(data=1))[0]


@pytest.mark.parametrize("layout", [{}, {"expert": 2}], ids=["data", "expert"])
def test_two_ranks_take_the_steps_of_one_and_share_its_state(
    alone: Seen, layout: dict[str, int]
) -> None:
    seen, counts = run_ranks(train, (None, range(3)), ParallelLayout.over(2, **layout))
    if not layout:  # experts that are not the whole stack get other gradients here
        assert same(seen.weights, alone.weights)
        for index, values in alone.state["adamw"]["state"].items():
            assert same(seen.state["adamw"]["state"][index], values)
    assert sum(counts) == alone.held
    assert max(counts) < 0.6 * alone.held


def test_state_of_two_ranks_goes_on_in_one_and_back(alone: Seen) -> None:
    first, _ = run_ranks(train, (None, range(2)), ParallelLayout(data=2))
    on_one, _ = run_ranks(train, (copy.deepcopy(first.state), range(2, 3)), ParallelLayout(data=1))
    on_two, _ = run_ranks(train, (first.state, range(2, 3)), ParallelLayout(data=2))
    for index, values in alone.state["adamw"]["state"].items():
        assert same(on_one.state["adamw"]["state"][index], values)
        assert same(on_two.state["adamw"]["state"][index], values)
