"""Low-rank adapters: nothing changes before the first step, only they move, merged they are the model."""

import pytest
import torch

from ostinato.models.network.adapters import attach_adapters, weights_put_back
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.spec import ModelSpec
from ostinato.models.training.optimizer import build_optimizer, set_learning_rates
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.models.weight_shapes import num_parameters
from tests.fakes.small_spec import SMALL_SPEC, make_spec

RANK = 3
DENSE = make_spec(40, 32, max_sequence_tokens=64).model_copy(
    update={"num_dense_layers": 1, "dense_hidden_size": 24, "shared_expert_hidden_size": 16}
)
SPECS = {"experts": SMALL_SPEC, "dense first, shared expert": DENSE}


def tokens_BT() -> torch.Tensor:
    return torch.randint(0, 40, (3, 17), generator=torch.Generator().manual_seed(5))


def adapted(spec: ModelSpec) -> TrainerModel:
    model = build_trainer_model(spec, seed=1)
    attach_adapters(model, RANK, 6.0, seed=2)
    return model


def take_step(model: TrainerModel) -> None:
    optimizer = build_optimizer(model, OptimizerConfig())
    set_learning_rates(optimizer, muon=1e-2, adam=1e-2)
    for _ in range(2):  # the first moves only what began as zeros
        optimizer.zero_grad()
        (-model.token_logprobs(tokens_BT()).sum()).backward()
        optimizer.step()
    model.routers.balance(model.routers.counts_LE(), 0.1)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_fresh_adapters_change_nothing(spec: ModelSpec) -> None:
    base, model = build_trainer_model(spec, seed=1), adapted(spec)
    assert torch.equal(model.token_logprobs(tokens_BT()), base.token_logprobs(tokens_BT()))
    before, after = base.export_weights(), model.export_weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_merged_weights_are_the_model_that_was_trained(spec: ModelSpec) -> None:
    model = adapted(spec)
    take_step(model)
    merged = build_trainer_model(spec, seed=7)
    merged.import_weights(model.export_weights())
    found, wanted = merged.token_logprobs(tokens_BT()), model.token_logprobs(tokens_BT())
    # two orders of the same fp32 sums
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert (
        wanted - build_trainer_model(spec, seed=1).token_logprobs(tokens_BT())
    ).abs().max() > 0.01


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_other_weights_in_the_model_for_a_while_leave_no_trace(spec: ModelSpec) -> None:
    model = adapted(spec)
    take_step(model)
    before = model.token_logprobs(tokens_BT())
    other = build_trainer_model(spec, seed=9)
    with weights_put_back(model):
        model.import_weights(other.export_weights())
        assert torch.equal(model.token_logprobs(tokens_BT()), other.token_logprobs(tokens_BT()))
    assert torch.equal(model.token_logprobs(tokens_BT()), before)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_only_linear_layers_move_and_by_a_low_rank(spec: ModelSpec) -> None:
    before = build_trainer_model(spec, seed=1).export_weights()
    model = adapted(spec)
    take_step(model)
    moved = {
        name: after - before[name]
        for name, after in model.export_weights().items()
        if not torch.equal(after, before[name])
    }
    kinds = {name.rpartition("layers.")[2].partition(".")[2] for name in moved}
    assert {"self_attn.q_proj.weight", "self_attn.o_proj.weight"} <= kinds
    assert not {
        kind for kind in kinds if "norm" in kind or "embed" in kind or "gate.weight" in kind
    }
    if spec is DENSE:
        assert {"mlp.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight"} <= kinds
    for name, difference in moved.items():
        assert torch.linalg.matrix_rank(difference.double(), atol=1e-5) <= RANK, name


def test_adapters_alone_move() -> None:
    model, other = adapted(DENSE), adapted(DENSE)
    take_step(model)
    kept = model.moving_tensors()
    with torch.no_grad():
        for name, tensor in other.moving_tensors().items():
            tensor.copy_(kept[name])
    assert torch.equal(other.token_logprobs(tokens_BT()), model.token_logprobs(tokens_BT()))
    assert sum(value.numel() for value in kept.values()) < 0.5 * num_parameters(DENSE)
