"""What multiplies in bf16: on a GPU all but routers in every precision but fp32, on a CPU the experts alone."""

import math
from typing import get_args

import pytest
import torch

from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.device import current_device
from ostinato.models.network.adapters import attach_adapters
from ostinato.models.network.attention import core
from ostinato.models.network.build import TrainerModel, build_trainer_model, recompute_layers
from ostinato.models.network.head import score_tokens
from ostinato.models.network.mixed import ColumnLinear, is_mixed
from ostinato.models.process_groups import close_process_groups, open_process_groups
from ostinato.models.training.config import TrainingPrecision
from ostinato.models.training.drafts import draft_divergence
from tests.fakes.short_training import losses_of_steps
from tests.unit.tasks.pretraining.test_layouts import FAMILIES

BF16_ERROR = 2**-8


@pytest.fixture(autouse=True)
def closed_groups():
    close_process_groups()
    yield
    close_process_groups()


def routes_of(model: TrainerModel, tokens_BT: torch.Tensor) -> torch.Tensor:
    """routes_BTLK: the experts that the model chooses."""
    routers = [layer.mlp.router for layer in model.layers if hasattr(layer.mlp, "router")]
    for router in routers:
        router.chosen = []
    with torch.no_grad():
        model.forward_hidden(tokens_BT)
    rows, length = tokens_BT.shape
    routes_LTBK = torch.stack([router.chosen[0].view(length, rows, -1) for router in routers])
    for router in routers:
        router.chosen = None
    return routes_LTBK.permute(2, 1, 0, 3)


def learn(
    model: TrainerModel,
    tokens_BT: torch.Tensor,
    routes_BTLK: torch.Tensor,
    dtype: torch.dtype | None,
) -> tuple[float, torch.Tensor]:
    """Loss of trunk and draft layers, and all gradients. `dtype`: as a GPU's backward pass takes it, which Megatron's
    layers keep for CUDA alone.
    """
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        hidden_TBD = model.forward_hidden(tokens_BT, routes_BTLK, plausibility_ratio=0.0)
        logprobs_BT, _ = model.score_hidden(hidden_TBD, tokens_BT)
        mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        divergence = draft_divergence(model, hidden_TBD, tokens_BT, mask_BT, reaches_trunk=True)
        loss = divergence.mean() - logprobs_BT[:, 1:].mean()
        loss.backward()
    assert hidden_TBD.dtype == logprobs_BT.dtype == divergence.dtype == torch.float32
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(2)
def test_a_mixed_model_learns_nearly_what_it_learns_in_fp32(name: str, recomputed: bool) -> None:
    """Walked on the CPU: all families, with draft layers, with and without recomputation.

    Both passes use the experts that fp32 chooses. Where two experts score nearly alike, rounding chooses the other
    one: 1 of 180 draws of tokens had a cosine under 0.98. With the same experts, 600 of 600 draws are over 0.998.
    """
    open_process_groups(kind="cpu")
    spec = FAMILIES[name].model_copy(update={"mtp_depth": 2, "mtp_hidden_size": 24})
    tokens_BT = torch.randint(0, spec.vocab_size, (3, 24))
    model = build_trainer_model(spec, seed=2)
    recompute_layers(model, recomputed)
    routes_BTLK = routes_of(model, tokens_BT)
    loss, plain = learn(model, tokens_BT, routes_BTLK, None)

    model.is_mixed = True
    mixed_loss, mixed = learn(model, tokens_BT, routes_BTLK, torch.bfloat16)

    assert mixed_loss != loss
    assert mixed_loss == pytest.approx(loss, rel=0.01)
    assert torch.cosine_similarity(mixed, plain, dim=0) > 0.99


def test_adapters_learn_in_a_mixed_model() -> None:
    open_process_groups(kind="cpu")
    spec = FAMILIES["qwen3_moe"]
    tokens_BT = torch.randint(0, spec.vocab_size, (3, 24))
    model = build_trainer_model(spec, seed=2)
    attach_adapters(model, 4, 8.0, seed=0)
    model.is_mixed = True
    with torch.autocast("cpu", torch.bfloat16):
        (-model.token_logprobs(tokens_BT).mean()).backward()
    moved = [weight for weight in model.adapters.parameters() if weight.grad is not None]
    assert moved
    assert all(weight.grad.dtype == torch.float32 for weight in moved)  # type: ignore[union-attr]


def test_a_column_sums_gradients_of_a_cut_sequence_in_the_dtype_of_products() -> None:
    """Its backward pass reduces them into a buffer like its input, which norms give in fp32."""
    open_process_groups(kind="cpu")
    model = build_trainer_model(FAMILIES["qwen3_moe"])
    column = model.layers[0].self_attention.linear_qkv
    assert isinstance(column, ColumnLinear)
    column.sequence_parallel = True  # over the one rank there is
    hidden_TBD = torch.randn(4, 2, column.weight.shape[1], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        column(hidden_TBD)[0].sum().backward()
    assert hidden_TBD.grad is not None
    assert hidden_TBD.grad.dtype == torch.float32


def test_recipes_know_the_precisions_of_the_kernels() -> None:
    assert get_args(TrainingPrecision) == get_args(PrecisionName)


def test_a_cpu_keeps_dense_products_in_fp32() -> None:
    open_process_groups(kind="cpu")
    assert not is_mixed("bf16", None)
    assert not is_mixed("fp32", None)
    assert is_mixed("bf16", "bf16")  # Transformer Engine's modules, which no CPU runs


def test_the_output_matrix_multiplies_in_the_dtype_of_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(9, 32, generator=generator)
    head_VD = torch.nn.Parameter(torch.randn(50, 32, generator=generator) / math.sqrt(32))
    targets_N = torch.arange(9)
    wanted_N, _ = score_tokens(hidden_ND, head_VD, targets_N, with_entropy=False)

    with torch.autocast("cpu", torch.bfloat16):
        seen_N, _ = score_tokens(hidden_ND, head_VD, targets_N, with_entropy=False)
    seen_N.sum().backward()

    assert 0 < (seen_N.float() - wanted_N).abs().max() < 16 * BF16_ERROR
    assert head_VD.grad is not None
    assert head_VD.grad.dtype == torch.float32


def test_attention_takes_outputs_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of GPUs put the heads of a token side by side."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(6, 2, heads, 8, generator=generator) for heads in (4, 2, 2)
    )  # tokens, rows, heads, width
    wanted = core._attend(query, key, value)
    compute = core.causal_attention

    def by_token(*parts: torch.Tensor) -> torch.Tensor:
        return compute(*parts).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(core, "causal_attention", by_token)
    torch.testing.assert_close(core._attend(query, key, value), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_learns_in_bf16_as_in_fp32(name: str) -> None:
    open_process_groups(kind="cuda")
    spec = FAMILIES[name]
    tokens_BT = torch.randint(0, spec.vocab_size, (4, 48), device=current_device())
    losses = []
    for precision in ("fp32", "bf16"):
        model = build_trainer_model(spec, precision=precision)  # type: ignore[arg-type]
        losses.append(losses_of_steps(model, tokens_BT, 4))
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
    plain, mixed = losses
    assert plain != mixed
    assert mixed == pytest.approx(plain, rel=0.02)
    assert plain[-1] < plain[0]
