"""AdamW over two ranks: each keeps its part of the state, and the weights are those of one rank."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.training.optimizer import CombinedOptimizer, build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig
from tests.fakes.optimizer_states import State, load_state, save_state
from tests.fakes.small_spec import make_spec

# a dense layer and a layer of experts
SPEC = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=64).model_copy(
    update={"num_dense_layers": 1, "dense_hidden_size": 48}
)
CONFIG = OptimizerConfig(kind="adamw")


class Seen(NamedTuple):
    """Weights and the optimiser's whole state after some steps, and elements of state that the rank holds."""

    weights: dict[str, Tensor]
    state: State
    held: int


def take_steps(model: TrainerModel, optimizer: CombinedOptimizer, seeds: range) -> None:
    """Steps of the same gradients on every rank."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for _, whole in sorted(model.named_parameters()):
            if whole.requires_grad:
                whole.grad = torch.randn(whole.shape, generator=generator)
        optimizer.step()


def train(given: tuple[Path | None, Path, range], rank: int) -> tuple[Seen, list[int]]:
    """Steps after a saved state (None: from the start), and their state saved."""
    earlier, folder, seeds = given
    model = build_trainer_model(SPEC, torch.distributed.get_world_size(), seed=1)
    optimizer = build_optimizer(model, CONFIG)
    if earlier is not None:
        load_state(earlier, model, optimizer)
    take_steps(model, optimizer, seeds)
    held = sum(one.tensor.numel() for one in optimizer.states() if one.tensor.ndim)
    counts = torch.zeros(torch.distributed.get_world_size())
    counts[rank] = held
    torch.distributed.all_reduce(counts)
    state = save_state(folder, model, optimizer)
    return Seen(model.export_weights(), state, held), [int(count) for count in counts]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("alone") / "state"
    return run_ranks(train, (None, folder, range(3)), ParallelLayout(data=1))[0]


@pytest.mark.parametrize("layout", [{}, {"expert": 2}], ids=["data", "expert"])
@pytest.mark.sampled(1)
def test_two_ranks_take_the_steps_of_one_and_share_its_state(
    tmp_path: Path, alone: Seen, layout: dict[str, int]
) -> None:
    given = None, tmp_path / "state", range(3)
    seen, counts = run_ranks(train, given, ParallelLayout.over(2, **layout))
    if not layout:  # experts that are not the whole stack get other gradients here
        assert same(seen.weights, alone.weights)
        assert len(alone.state) > 10
        assert same(seen.state, alone.state)
    assert sum(counts) == alone.held
    assert max(counts) < 0.6 * alone.held


def test_state_of_two_ranks_goes_on_in_one_and_back(tmp_path: Path, alone: Seen) -> None:
    first = tmp_path / "first"
    run_ranks(train, (None, first, range(2)), ParallelLayout(data=2))
    for ranks in (1, 2):
        given = first, tmp_path / str(ranks), range(2, 3)
        on_ranks, _ = run_ranks(train, given, ParallelLayout(data=ranks))
        assert same(on_ranks.state, alone.state)
