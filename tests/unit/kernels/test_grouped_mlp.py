"""The expert layer by precision: gradients, accuracy bars, and backends that agree."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ostinato.kernels.accelerator import check_runs_grouped_products
from ostinato.kernels.grouped_gemm.op import grouped_mm, grouped_wgrad
from ostinato.kernels.grouped_gemm.reference import grouped_mm_reference, grouped_wgrad_reference
from ostinato.kernels.moe.grouped_mlp import dispatch, grouped_mlp
from ostinato.kernels.moe.precision import OperandPrecision, PrecisionName, find_precision
from ostinato.kernels.moe.reference import expert_mlp_reference
from ostinato.kernels.mxfp8.op import dequantize, fake_quantize, quantize, quantize_row_col
from ostinato.kernels.permutation.op import permute
from ostinato.kernels.swiglu.op import swiglu, swiglu_backward
from ostinato.kernels.swiglu.reference import swiglu_reference

EXACT = OperandPrecision(torch.float64, None, True)
CPU = torch.device("cpu")


def signal_to_noise_db(value: Tensor, wanted: Tensor) -> float:
    noise = (value.double() - wanted.double()).square().sum()
    return (10 * torch.log10(wanted.double().square().sum() / noise)).item()


def draw_layer(
    num_tokens: int, width: int, inner: int, num_experts: int, top_k: int
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    weights, experts = scores.topk(top_k)
    matrices = (
        normal(num_experts, 2 * inner, width) / width**0.5,
        normal(num_experts, width, inner) / inner**0.5,
    )
    return normal(num_tokens, width), experts, weights, *matrices


def run_layer(inputs: tuple[Tensor, ...], precision: OperandPrecision) -> list[Tensor]:
    """Output and gradients of tokens, weights and matrices."""
    tokens, experts, weights, gate_up, down = inputs
    dtype = torch.float64 if precision.dtype == torch.float64 else torch.float32
    leaves = [leaf.to(dtype).detach().requires_grad_() for leaf in (tokens, weights, gate_up, down)]
    output = grouped_mlp(leaves[0], experts, *leaves[1:], precision=precision)
    direction = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    return [output, *torch.autograd.grad(output, leaves, direction.to(dtype))]


def test_unrounded_layer_equals_its_formula_and_passes_gradcheck() -> None:
    inputs = draw_layer(6, 8, 4, 3, 2)
    tokens, experts, weights, gate_up, down = (
        x.requires_grad_() if x.is_floating_point() else x for x in inputs
    )
    output = grouped_mlp(tokens, experts, weights, gate_up, down, precision=EXACT)
    wanted = expert_mlp_reference(tokens, experts, weights, gate_up, down)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    torch.autograd.gradcheck(
        lambda *leaves: grouped_mlp(leaves[0], experts, *leaves[1:], precision=EXACT),
        (tokens, weights, gate_up, down),
    )


LEAVES = ("tokens", "weights", "gate_up", "down")
FROZEN = [(), ("gate_up",), ("down",), ("gate_up", "down"), ("tokens",), ("tokens", "gate_up")]


def differentiate(
    inputs: tuple[Tensor, ...], precision: OperandPrecision, frozen: tuple[str, ...]
) -> tuple[dict[str, Tensor], int]:
    """Gradients of what is not frozen, and the products' operations in the backward pass."""
    tokens, experts, weights, gate_up, down = inputs
    named = zip(LEAVES, (tokens, weights, gate_up, down), strict=True)
    leaves = {name: leaf.clone().requires_grad_(name not in frozen) for name, leaf in named}
    output = grouped_mlp(leaves["tokens"], experts, *list(leaves.values())[1:], precision=precision)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    with FlopCounterMode(display=False) as counter:
        found = torch.autograd.grad(output, list(wanted.values()), torch.ones_like(output))
    return dict(zip(wanted, found, strict=True)), counter.get_total_flops()


@pytest.mark.parametrize("frozen", FROZEN)
def test_no_product_is_made_for_what_is_frozen(frozen: tuple[str, ...]) -> None:
    inputs = draw_layer(40, 16, 8, 4, 2)
    rows = dispatch(inputs[0], inputs[1], inputs[2], 4, EXACT).plan.ends_E[-1].item()
    _, operations = differentiate(inputs, EXACT, frozen)
    # the first matrix is twice as large; the gradient of the SwiGLU's rows is always made
    products = {"tokens": 2, "gate_up": 2, "down": 1}
    made = 1 + sum(size for leaf, size in products.items() if leaf not in frozen)
    assert operations == made * 2 * rows * 16 * 8


@pytest.mark.parametrize("frozen", FROZEN[1:])
@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("name", ["bf16", "mx32", "mx128"])
def test_other_gradients_do_not_depend_on_what_is_frozen(
    name: PrecisionName, emulated: bool, frozen: tuple[str, ...]
) -> None:
    inputs = draw_layer(40, 128, 128, 4, 2)
    precision = OperandPrecision(torch.bfloat16, find_precision(name, CPU).group, emulated)
    everything, _ = differentiate(inputs, precision, ())
    some, _ = differentiate(inputs, precision, frozen)
    assert set(some) == set(LEAVES) - set(frozen)
    for leaf, gradient in some.items():
        assert torch.equal(gradient, everything[leaf])


@pytest.mark.parametrize("found", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_gpus_older_than_hopper_are_refused(
    found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_runs_grouped_products(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    device = torch.device("cuda", 0)
    if found >= (9, 0):
        check_runs_grouped_products(device)
        return
    with pytest.raises(ValueError, match=r"capability \(8, \d\), wanted \(9, 0\) .* \"fp32\""):
        check_runs_grouped_products(device)


@pytest.mark.parametrize(
    ("name", "bars"),
    [
        ("bf16", (45, 40, 40, 40, 40)),
        # output, tokens, routing weights, both matrices: each path holds two to four roundings
        ("mx32", (23, 21, 21, 21, 21)),
        ("mx128", (23, 21, 21, 21, 21)),
    ],
)
def test_layer_keeps_its_accuracy(name: PrecisionName, bars: tuple[int, ...]) -> None:
    inputs = draw_layer(512, 256, 128, 4, 2)
    exact = run_layer(inputs, EXACT)
    rounded = run_layer(inputs, find_precision(name, CPU))
    for value, wanted, bar in zip(rounded, exact, bars, strict=True):
        assert signal_to_noise_db(value, wanted) >= bar


@pytest.mark.parametrize("name", ["mx32", "mx128"])
def test_emulated_and_stored_operands_give_the_same_layer(name: PrecisionName) -> None:
    inputs = draw_layer(200, 128, 128, 4, 2)
    emulated = find_precision(name, CPU)
    stored = OperandPrecision(emulated.dtype, emulated.group, emulated=False)
    for value, wanted in zip(run_layer(inputs, stored), run_layer(inputs, emulated), strict=True):
        # the operands are equal; bf16 results may differ where sums ran in another order
        assert signal_to_noise_db(value, wanted) >= 48


@pytest.mark.parametrize("group", [32, 128])
def test_products_of_rounded_operands_keep_the_bars(group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights, grads = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((512, 512), (2, 256, 512), (512, 256))
    )
    ends = torch.tensor([128, 512], dtype=torch.int32)
    square = (group if group == 128 else 1, group)
    out = grouped_mm(quantize(rows, (1, group)), quantize(weights, square), ends)
    assert signal_to_noise_db(out, grouped_mm_reference(rows, weights, ends)) >= 27
    # contracts what the forward product did not
    dgrad = grouped_mm(
        quantize(grads, (1, group)), quantize(weights, square), ends, transposed=True
    )
    wanted = grouped_mm_reference(grads, weights.transpose(1, 2), ends)
    assert signal_to_noise_db(dgrad, wanted) >= 25
    wanted = grouped_wgrad_reference(grads, rows, ends)
    if group == 32:
        wgrad = grouped_wgrad(quantize(grads, (1, 32)), quantize(rows, (1, 32)), ends)
    else:
        wgrad = grouped_wgrad(quantize_row_col(grads, 128)[1], quantize_row_col(rows, 128)[1], ends)
    assert signal_to_noise_db(wgrad, wanted) >= 24


def test_one_copy_is_as_accurate_as_two() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(512, 256, generator=generator)
    rows = (rows * torch.exp(2 * torch.randn(512, 1, generator=generator))).bfloat16()
    grads = torch.randn(512, 256, generator=generator).bfloat16()
    exact = grads.double().T @ rows.double()
    one = fake_quantize(grads, (1, 32)).double().T @ fake_quantize(rows, (1, 32)).double()
    two = fake_quantize(grads, (32, 1)).double().T @ fake_quantize(rows, (32, 1)).double()
    assert abs(signal_to_noise_db(one, exact) - signal_to_noise_db(two, exact)) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_equal_the_loops(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    ends = torch.tensor([64, 64, 192], dtype=torch.int32)
    rows, weights, grads = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((256, 64), (3, 96, 64), (256, 96))
    )
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-1}
    )
    for count in (192, 256):
        out = grouped_mm(rows[:count], weights, ends)[:192]
        wanted = grouped_mm_reference(rows[:192], weights, ends)
        torch.testing.assert_close(out.double(), wanted, **tolerance)
        wgrad = grouped_wgrad(grads[:count], rows[:count], ends)
        wanted = grouped_wgrad_reference(grads[:192], rows[:192], ends)
        torch.testing.assert_close(wgrad.double(), wanted, **tolerance)
        assert not wgrad[1].any()


def test_operands_that_do_not_fit_each_other_are_refused() -> None:
    matrix = torch.randn(128, 128).bfloat16()
    ends = torch.tensor([128], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weights have blocks of \(1, 128\)"):
        grouped_mm(quantize(matrix, (1, 128)), quantize(matrix[None], (1, 128)), ends)
    with pytest.raises(ValueError, match="wanted blocks along the last dimension"):
        grouped_mm(quantize(matrix, (32, 1)), quantize(matrix[None], (1, 32)), ends)
    with pytest.raises(ValueError, match="wanted equal blocks"):
        grouped_wgrad(quantize(matrix, (1, 128)), quantize(matrix, (1, 32)), ends)


def test_swiglu_equals_its_formula_both_ways() -> None:
    generator = torch.Generator().manual_seed(3)
    inner, scale, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 12), (5,), (5, 6))
    )
    active = swiglu_reference(inner, scale)
    wanted = torch.autograd.grad(active, (inner, scale), grad)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(inner, scale), active)
        grad_inner, grad_scale, again = swiglu_backward(grad, inner, scale)
    torch.testing.assert_close((grad_inner, grad_scale), wanted)
    torch.testing.assert_close(again, active)


@pytest.mark.parametrize("name", ["bf16", "mx32", "mx128"])
def test_padding_rows_and_unused_experts_get_no_gradient(name: PrecisionName) -> None:
    tokens, _, weights, gate_up, down = draw_layer(10, 128, 128, 4, 2)
    experts = torch.tensor([[0, 2]] * 10)
    results = run_layer((tokens, experts, weights, gate_up, down), find_precision(name, CPU))
    for gradient in results[3:]:
        assert not gradient[[1, 3]].any()
        assert gradient[[0, 2]].flatten(1).any(1).all()


def test_dequantized_rows_are_what_was_sent() -> None:
    tokens, experts, weights, *_ = draw_layer(40, 64, 32, 4, 2)
    stored = OperandPrecision(torch.bfloat16, 32, emulated=False)
    emulated = OperandPrecision(torch.bfloat16, 32, emulated=True)
    sent = dispatch(tokens.bfloat16(), experts, weights, 4, stored)
    plain = permute(tokens.bfloat16(), sent.plan)
    assert torch.equal(dequantize(sent.rows), fake_quantize(plain, (1, 32)))
    other = dispatch(tokens.bfloat16(), experts, weights, 4, emulated)
    assert torch.equal(other.rows[other.plan.place_NK], dequantize(sent.rows)[sent.plan.place_NK])
