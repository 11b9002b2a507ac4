"""The trainer model learns with its experts in every precision."""

import pytest
import torch

from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.network.build import build_trainer_model
from ostinato.models.training.optimizer import build_optimizer, set_learning_rates
from ostinato.models.training.optimizer_config import OptimizerConfig
from tests.fakes.small_spec import SMALL_SPEC

STEPS = 12


def losses_of(precision: PrecisionName) -> list[float]:
    """Losses of a few steps on one small batch from the same weights."""
    model = build_trainer_model(SMALL_SPEC, seed=1, precision=precision)
    model.draft.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(kind="adamw"))
    set_learning_rates(optimizer, muon=0.0, adam=5e-3)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, SMALL_SPEC.vocab_size, (4, 24), generator=generator)
    losses = []
    for _ in range(STEPS):
        loss = -model.token_logprobs(tokens_BT)[:, 1:].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    return losses_of("fp32")


@pytest.mark.parametrize("precision", ["bf16", "mx32", "mx128"])
def test_losses_follow_those_of_fp32(precision: PrecisionName, plain_losses: list[float]) -> None:
    losses = losses_of(precision)
    assert losses[-1] < losses[0] - 0.5
    assert losses != plain_losses
    for loss, plain in zip(losses, plain_losses, strict=True):
        # e4m3 keeps four bits; what is left of that after averaging over a layer is under a percent
        assert abs(loss - plain) < 0.02 * plain


def test_weights_stay_in_fp32_and_travel_unchanged() -> None:
    model = build_trainer_model(SMALL_SPEC, seed=1, precision="mx32")
    plain = build_trainer_model(SMALL_SPEC, seed=1)
    weights = plain.export_weights()
    assert all(torch.equal(weights[name], value) for name, value in model.export_weights().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
