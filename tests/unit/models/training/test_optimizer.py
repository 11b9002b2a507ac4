"""Muon and AdamW over a trainer model."""

from collections.abc import Iterator
from operator import mul
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.network.canonical import join_qkv
from ostinato.models.network.parallel.shards import find_cuts, local_shard
from ostinato.models.spec import ModelSpec
from ostinato.models.training import optimizer as optimizer_module
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.training.optimizer import (
    assign_to_ranks,
    build_optimizer,
    orthogonalise,
    orthogonalise_shared,
    set_learning_rates,
)
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.models.weight_shapes import weight_shapes
from tests.fakes.optimizer_states import State, load_state, save_state
from tests.fakes.small_spec import LATENT_OF_FOUR_HEADS, SMALL_SPEC, make_spec


def take_step(model: TrainerModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens_BT = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (-model.token_logprobs(tokens_BT).mean()).backward()
    optimizer.step()


def test_orthogonalise_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices, torch.float32))
    # the quintic does not converge to 1, it lands around it
    assert values.min() > 0.5
    assert values.max() < 1.3


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_deal_gives_each_matrix_to_one_rank_and_evens_the_work(ranks: int) -> None:
    shapes = [(7, 16, 40), (1, 8, 8), (32, 4, 40), (2, 40, 40), (5, 16, 16)]
    dealt = assign_to_ranks(shapes, ranks)
    assert [sum(counts) for counts in dealt] == [shape[0] for shape in shapes]
    costs = [rows**2 * columns for _, rows, columns in shapes]
    loads = [sum(map(mul, costs, counts)) for counts in zip(*dealt, strict=True)]
    assert max(loads) - min(loads) <= max(costs)


def shared_and_repeated(shapes: list[tuple[int, int, int]], rank: int) -> float:
    """Largest difference on the first rank between shared and repeated products."""
    generator = torch.Generator().manual_seed(0)
    stacks = [torch.randn(shape, generator=generator) for shape in shapes]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        shared = orthogonalise_shared(stacks, dtype, dist.group.WORLD)
        repeated = orthogonalise_shared(stacks, dtype, None)
        found += [(one - other).abs().max() for one, other in zip(shared, repeated, strict=True)]
    return float(max(found))


@pytest.mark.slow
def test_ranks_that_share_products_get_the_bits_of_one() -> None:
    shapes = [(7, 16, 40), (1, 8, 8), (32, 4, 40), (2, 40, 40)]  # one of them less than ranks
    assert run_ranks(shared_and_repeated, shapes, ParallelLayout(data=2)) == 0.0


def test_muon_treats_each_expert_as_its_own_matrix() -> None:
    model = build_trainer_model(SMALL_SPEC, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig())
    experts = model.trunk.decoder.layers[0].mlp.experts.gate_up_EGD
    before = experts.detach().clone()
    experts.grad = torch.zeros_like(experts)
    experts.grad[1] = torch.randn(experts.shape[1:], generator=torch.Generator().manual_seed(0))
    optimizer.step()
    moved = (experts.detach() - before).flatten(1).norm(dim=1)
    assert moved[1] > 0
    assert not moved[[0, 2, 3]].any()


GROUPED = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=64)
LATENT = ModelSpec.model_validate(
    {
        **GROUPED.model_dump(),
        **LATENT_OF_FOUR_HEADS,
    }
)


def random_gradients(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """By canonical name, query, key and value apart."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(spec).items()
    }


def matrices_of(name: str, tensor: torch.Tensor, spec: ModelSpec) -> Iterator[torch.Tensor]:
    """The matrices that Muon turns each on its own, as published files name and order them."""
    if name.endswith((".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".q_b_proj.weight")):
        yield from tensor.split(spec.head_dim)  # head by head
    elif name.endswith(".kv_b_proj.weight"):
        assert spec.latent is not None
        value = spec.latent.value_head_dim
        plain = spec.head_dim - spec.latent.rotary_head_dim
        for head in tensor.split(plain + value):
            yield from head.split((plain, value))
    else:
        yield from tensor.view(-1, *tensor.shape[-2:])


def step_by_muon(given: tuple[ModelSpec, Path], rank: int = 0) -> tuple[State, State]:
    """What a first step of rate 1 takes off each weight, and the optimiser's state after it, saved in a folder."""
    spec, folder = given
    gradients = random_gradients(spec)
    model = build_trainer_model(spec, dist.get_world_size() if dist.is_initialized() else 1)
    for name, tensor in model.canonical_tensors().items():
        if "qkv_proj" in name:
            parts = [gradients[name.replace("qkv", part)] for part in "qkv"]
            whole = join_qkv((parts[0], parts[1], parts[2]), spec)
        else:
            whole = gradients[name]
        tensor.grad = local_shard(whole, find_cuts(tensor)).clone()
    before = model.export_weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "newton_schulz_dtype", lambda device: torch.float32)
        optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.0), muon=1.0, adam=0.0)
        optimizer.step()
    state = save_state(folder, model, optimizer)
    moved = {name: before[name] - weight for name, weight in model.export_weights().items()}
    load_state(folder, model, optimizer)
    again = save_state(folder.with_name("again"), model, optimizer)
    for part, one in state.items():
        assert torch.equal(again[part], one), part
    return moved, state


def plain_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Of one matrix, in fp64, as it is published (Keller Jordan's Muon)."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.float()


def check_each_head(spec: ModelSpec, moved: dict[str, torch.Tensor]) -> None:
    gradients = random_gradients(spec)
    projections = [name for name in moved if "self_attn" in name and "norm" not in name]
    experts = [name for name in moved if ".experts." in name]
    assert len(projections) == 4 * spec.num_layers + (spec.latent is not None) * spec.num_layers
    for name in projections + experts:
        seen = matrices_of(name, moved[name], spec)
        for ours, gradient in zip(seen, matrices_of(name, gradients[name], spec), strict=True):
            wanted = 0.2 * max(gradient.shape) ** 0.5 * plain_newton_schulz(gradient)
            torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_muon_treats_each_head_as_its_own_matrix(tmp_path: Path, spec: ModelSpec) -> None:
    check_each_head(spec, step_by_muon((spec, tmp_path / "state"))[0])


@pytest.mark.slow
@pytest.mark.parametrize("spec", [GROUPED, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize(
    "degrees", [{"tensor": 2}, {"expert": 2}, {"expert_tensor": 2}, {"pipeline": 2}]
)
@pytest.mark.nightly
def test_muon_treats_each_head_alike_in_every_layout(
    tmp_path: Path, spec: ModelSpec, degrees: dict[str, int]
) -> None:
    _, alone = step_by_muon((spec, tmp_path / "alone"))
    given = spec, tmp_path / "state"
    moved, seen = run_ranks(step_by_muon, given, ParallelLayout.over(2, **degrees))
    check_each_head(spec, moved)
    assert seen.keys() == alone.keys()
    assert all(torch.equal(seen[part], one) for part, one in alone.items())


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_optimizer_fits_one_batch(kind: str) -> None:
    model = build_trainer_model(SMALL_SPEC, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig.model_validate({"kind": kind}))
    tokens_BT = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(0))
    first = float(model.token_logprobs(tokens_BT).mean())
    for _ in range(30):
        take_step(model, optimizer, seed=0)
    assert float(model.token_logprobs(tokens_BT).mean()) > first + 1.0


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_optimizer_state_survives_saving_bit_by_bit(tmp_path: Path, kind: str) -> None:
    config = OptimizerConfig.model_validate({"kind": kind})
    model, other = build_trainer_model(SMALL_SPEC, seed=0), build_trainer_model(SMALL_SPEC, seed=1)
    optimizer = build_optimizer(model, config)
    take_step(model, optimizer, seed=0)
    save_state(tmp_path / "state", model, optimizer)
    restored = build_optimizer(other, config)
    load_state(tmp_path / "state", other, restored)
    other.import_weights(model.export_weights())
    take_step(model, optimizer, seed=1)
    take_step(other, restored, seed=1)
    ours, theirs = model.export_weights(), other.export_weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_optimizer_leaves_frozen_parameters_out() -> None:
    model = build_trainer_model(SMALL_SPEC, seed=0)
    model.trunk.requires_grad_(False)
    held = [
        p
        for group in build_optimizer(model, OptimizerConfig()).param_groups
        for p in group["params"]
    ]
    assert {id(p) for p in held} == {id(p) for p in model.draft.parameters()}


def test_set_learning_rates_goes_by_kind() -> None:
    optimizer = build_optimizer(build_trainer_model(SMALL_SPEC, seed=0), OptimizerConfig())
    set_learning_rates(optimizer, muon=0.5, adam=0.25)
    assert {group["kind"]: group["lr"] for group in optimizer.param_groups} == {
        "muon": 0.5,
        "adamw": 0.25,
    }
