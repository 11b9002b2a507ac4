"""What multiplies in bf16: on a GPU all but routers in every precision but fp32, on a CPU the experts alone."""

import math

import pytest
import torch

from ostinato.models.device import current_device
from ostinato.models.network import attention
from ostinato.models.network.build import build_trainer_model
from ostinato.models.network.head import score_tokens
from ostinato.models.network.transformer_engine import is_mixed
from ostinato.models.process_groups import close_process_groups, open_process_groups
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig
from tests.unit.tasks.pretraining.test_layouts import FAMILIES

BF16_ERROR = 2**-8


@pytest.fixture(autouse=True)
def closed_groups():
    close_process_groups()
    yield
    close_process_groups()


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
    wanted = attention._attend(query, key, value)
    compute = attention.causal_attention

    def by_token(*parts: torch.Tensor) -> torch.Tensor:
        return compute(*parts).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(attention, "causal_attention", by_token)
    torch.testing.assert_close(attention._attend(query, key, value), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_learns_in_bf16_as_in_fp32(name: str) -> None:
    open_process_groups(kind="cuda")
    spec = FAMILIES[name]
    tokens_BT = torch.randint(0, spec.vocab_size, (4, 48), device=current_device())
    losses = []
    for precision in ("fp32", "bf16"):
        model = build_trainer_model(spec, precision=precision)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, OptimizerConfig(kind="adamw"))
        losses.append([])
        for _ in range(4):
            loss = -model.token_logprobs(tokens_BT).mean()
            losses[-1].append(loss.item())
            model.zero_grad()
            loss.backward()
            optimizer.step()
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
    plain, mixed = losses
    assert plain != mixed
    assert mixed == pytest.approx(plain, rel=0.02)
    assert plain[-1] < plain[0]
