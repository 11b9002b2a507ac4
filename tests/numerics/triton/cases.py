"""Every Triton kernel against its reference, interpreted. Run by test_interpreted.py in a process
of its own: whether Triton interprets is decided when it is first imported. Marks choose among these too.
"""

import pytest
import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor

from ostinato.kernels.grouped_gemm.reference import grouped_mm_reference, grouped_wgrad_reference
from ostinato.kernels.grouped_gemm.triton_tiles import aligned
from ostinato.kernels.logprobs.reference import token_logprobs_reference
from ostinato.kernels.mxfp8.op import dequantize, quantize, quantize_row_col
from ostinato.kernels.mxfp8.reference import dequantize_reference, quantize_reference
from ostinato.kernels.permutation.op import RowPlan, largest_rows, plan_rows_op
from ostinato.kernels.permutation.reference import permute_reference, unpermute_reference
from ostinato.kernels.swiglu.op import swiglu, swiglu_backward
from ostinato.kernels.triton_backend import (
    triton_bf16,
    triton_head,
    triton_mx128,
    triton_permute,
    triton_quantize,
    triton_swiglu,
)
from tests.numerics.triton import exact_interpreter

BLOCKS = [(1, 32), (32, 1), (1, 128), (128, 1), (128, 128), (32, 32)]
ENDS = torch.tensor([128, 128, 384], dtype=torch.int32)


@pytest.fixture(autouse=True, scope="module")
def exact() -> None:
    exact_interpreter.install()


def draw(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def relative_error(value: Tensor, wanted: Tensor) -> float:
    return ((value.double() - wanted.double()).norm() / wanted.double().norm()).item()


def test_triton_still_has_what_the_exact_casts_replace() -> None:
    assert all(name in vars(interpreter) for name in exact_interpreter.REPLACED)
    assert "create_dot" in vars(interpreter.InterpreterBuilder)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.sampled(1)
def test_quantize_is_exact(block: tuple[int, int]) -> None:
    matrix = draw(2, 130, 288)
    matrix[0, 3, 5], matrix[1, 129, 287] = float("nan"), float("inf")
    matrix[0, 64:128, :128] = -0.0
    values, scales = triton_quantize.quantize_triton(matrix, *block)
    wanted = quantize_reference(matrix, block)
    assert same_bits(values, wanted[0])
    assert torch.equal(scales, wanted[1])


@pytest.mark.parametrize("block", [(1, 32), (128, 128)])
@pytest.mark.sampled(1)
def test_dequantize_is_exact_for_every_code_and_scale(block: tuple[int, int]) -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(384, 1).view(torch.float8_e4m3fn)
    shape = (384 // block[0], 256 // block[1])
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    scales.view(-1)[:3] = torch.tensor([0, 254, 255])
    scales = scales.to(torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        out = triton_quantize.dequantize_triton(codes, scales, *block, dtype)
        wanted = dequantize_reference(codes, scales, block, dtype)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.sampled(1)
def test_row_and_column_copies_are_exact(group: int) -> None:
    matrix = draw(160, 272)
    outputs = triton_quantize.quantize_row_col_triton(matrix, group)
    wanted = quantize_row_col(matrix, group)
    for value, expected in zip(
        outputs,
        (wanted[0].values, wanted[0].scales, wanted[1].values, wanted[1].scales),
        strict=True,
    ):
        assert same_bits(value, expected)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.sampled(1)
def test_swiglu_quantize_equals_unfused(group: int) -> None:
    inner, scale = normal(40, 512).bfloat16(), normal(40, seed=1)
    values, scales = triton_swiglu.swiglu_quantize_triton(inner, scale, group)
    plain = triton_swiglu.swiglu_triton(inner, scale)
    assert same_bits(values, quantize_reference(plain, (1, group))[0])
    assert torch.equal(scales, quantize_reference(plain, (1, group))[1])
    # exp of two libraries differs in the last fp32 bit, which moves few bf16 roundings
    wanted = swiglu(inner, scale)
    assert relative_error(plain, wanted) < 1e-3
    assert (plain != wanted).float().mean() < 0.01


@pytest.mark.parametrize(("rows", "width"), [(160, 256), (5, 1), (700, 3), (3, 2500)])
@pytest.mark.sampled(1)
def test_swiglu_backward_equals_the_cpu_path(rows: int, width: int) -> None:
    grad, inner, scale = (
        normal(rows, width).bfloat16(),
        normal(rows, 2 * width, seed=1).bfloat16(),
        normal(rows, seed=2),
    )
    found = triton_swiglu.swiglu_backward_triton(grad, inner, scale)
    for value, expected in zip(found, swiglu_backward(grad, inner, scale), strict=True):
        assert relative_error(value, expected) < 1e-3


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(100, 6, 2), (300, 32, 4)])
@pytest.mark.sampled(1)
def test_plan_permute_and_unpermute_are_exact(
    num_tokens: int, num_experts: int, top_k: int
) -> None:
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    experts = scores.topk(top_k).indices
    bound = largest_rows(experts.numel(), num_experts, 32)
    place, source, ends = triton_permute.plan_rows_triton(experts, num_experts, 32, bound)
    wanted = plan_rows_op(experts, num_experts, 32, bound)
    assert torch.equal(place, wanted[0])
    assert torch.equal(source, wanted[1])
    assert torch.equal(ends, wanted[2])
    tokens = draw(num_tokens, 96)
    plan = RowPlan(place, source, ends)
    rows = triton_permute.permute_triton(tokens, plan)
    assert torch.equal(rows, permute_reference(tokens, source))
    mx = quantize(tokens, (1, 32))
    assert same_bits(triton_permute.permute_triton(mx.values, plan), quantize(rows, (1, 32)).values)
    total = triton_permute.unpermute_triton(rows, plan)
    assert torch.equal(total, unpermute_reference(rows, place))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.sampled(1)
def test_grouped_product(transposed: bool) -> None:
    weights = draw(3, 160, 192, spread=0.0)
    rows = draw(400, 160 if transposed else 192, seed=1, spread=0.0)
    out = triton_bf16.grouped_mm_triton(rows, weights, ENDS, transposed)
    right = weights.transpose(1, 2) if transposed else weights
    wanted = grouped_mm_reference(rows, right, ENDS)
    # half a unit of bf16's last place, on average over signs 1.7e-3
    assert relative_error(out[:384], wanted[:384]) < 4e-3


RAGGED = torch.tensor([32, 32, 185, 217], dtype=torch.int32)


@pytest.mark.parametrize("width", [96, 83])
@pytest.mark.nightly
def test_grouped_product_with_ragged_experts(width: int) -> None:
    weights, rows = draw(4, 61, width, spread=0.0), draw(217, width, seed=1, spread=0.0)
    out = triton_bf16.grouped_mm_triton(rows, weights, RAGGED, False)
    assert relative_error(out, grouped_mm_reference(rows, weights, RAGGED)) < 4e-3


@pytest.mark.parametrize(
    ("ends", "num_rows", "columns", "width"),
    [
        ([200], 200, 61, 83),
        ([20], 20, 1, 1),
        ([5, 20], 20, 9, 7),
        ([1, 130], 130, 3, 130),
        ([7, 150], 190, 40, 24),
        ([30, 30, 30, 140, 140], 140, 40, 24),
    ],
    ids=["one expert", "1 x 1", "9 x 7", "3 x 130", "rows behind the last", "equal ends"],
)
@pytest.mark.sampled(1)
def test_grouped_products_at_the_edges(
    ends: list[int], num_rows: int, columns: int, width: int
) -> None:
    ends_E, last = torch.tensor(ends, dtype=torch.int32), ends[-1]
    weights = draw(len(ends), columns, width, spread=0.0)
    rows = draw(num_rows, width, seed=1, spread=0.0)
    grads = draw(num_rows, columns, seed=2, spread=0.0)
    rows[last:], grads[last:] = float("nan"), float("nan")
    out = triton_bf16.grouped_mm_triton(rows, weights, ends_E, False)
    assert out.shape == (num_rows, columns)
    wanted = grouped_mm_reference(rows, weights, ends_E)
    assert relative_error(out[:last], wanted[:last]) < 4e-3
    out = triton_bf16.grouped_mm_triton(grads, weights, ends_E, True)
    assert out.shape == (num_rows, width)
    wanted = grouped_mm_reference(grads, weights.transpose(1, 2), ends_E)
    assert relative_error(out[:last], wanted[:last]) < 4e-3
    out = triton_bf16.grouped_wgrad_triton(grads, rows, ends_E)
    assert relative_error(out, grouped_wgrad_reference(grads, rows, ends_E)) < 4e-3


def test_a_view_is_copied_only_where_a_descriptor_cannot_read_it() -> None:
    rows, weights = draw(40, 192), draw(3, 40, 64)
    for view in (rows, rows[:, 8:104], rows[3:, :61], weights[1:, :9], weights[:, :, 16:40]):
        assert aligned(view) is view
    for view in (rows[:, 3:99], rows.T, rows[:1].expand(40, -1), draw(40, 61), rows[:, ::2]):
        assert aligned(view) is not view
        assert torch.equal(aligned(view), view)


@pytest.mark.nightly
def test_grouped_products_of_an_aligned_view() -> None:
    weights, rows = draw(4, 64, 96, spread=0.0), draw(217, 192, seed=1, spread=0.0)
    out = triton_bf16.grouped_mm_triton(rows[:, 8:104], weights, RAGGED, False)
    assert relative_error(out, grouped_mm_reference(rows[:, 8:104], weights, RAGGED)) < 4e-3
    out = triton_bf16.grouped_wgrad_triton(rows[:, 8:104], rows[:, 104:], RAGGED)
    wanted = grouped_wgrad_reference(rows[:, 8:104], rows[:, 104:], RAGGED)
    assert relative_error(out, wanted) < 4e-3


@pytest.mark.nightly
def test_grouped_products_of_a_view_that_starts_anywhere() -> None:
    weights, rows = draw(4, 64, 96, spread=0.0), draw(217, 192, seed=1, spread=0.0)
    out = triton_bf16.grouped_mm_triton(rows[:, 3:99], weights, RAGGED, False)
    wanted = grouped_mm_reference(rows[:, 3:99], weights, RAGGED)
    assert relative_error(out, wanted) < 4e-3
    out = triton_bf16.grouped_wgrad_triton(rows[:, 3:99], rows[:, 100:], RAGGED)
    wanted = grouped_wgrad_reference(rows[:, 3:99], rows[:, 100:], RAGGED)
    assert relative_error(out, wanted) < 4e-3


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.sampled(1)
def test_an_experts_nan_stays_its_own(transposed: bool) -> None:
    weights, rows = draw(4, 80, 80, spread=0.0), draw(217, 80, seed=1, spread=0.0)
    weights[2], rows[32:185] = float("nan"), float("nan")
    out = triton_bf16.grouped_mm_triton(rows, weights, RAGGED, transposed)
    right = weights.transpose(1, 2) if transposed else weights
    wanted = grouped_mm_reference(rows, right, RAGGED)
    assert torch.equal(out.isnan(), wanted.isnan())
    out = triton_bf16.grouped_wgrad_triton(rows, rows, RAGGED)
    assert torch.equal(out.isnan(), grouped_wgrad_reference(rows, rows, RAGGED).isnan())


def test_no_rows_at_all() -> None:
    none = torch.zeros(3, dtype=torch.int32)
    weights, rows = draw(3, 64, 96), draw(0, 96)
    assert triton_bf16.grouped_mm_triton(rows, weights, none, False).shape == (0, 64)
    assert not triton_bf16.grouped_wgrad_triton(rows[:, :64], rows, none).any()
    rows, weights = quantize(draw(0, 128), (1, 128)), quantize(draw(3, 64, 128), (128, 128))
    out = triton_mx128.grouped_mm_mx128_triton(
        rows.values, rows.scales, weights.values, weights.scales, none
    )
    assert out.shape == (0, 64)
    values = rows.values.T.contiguous()
    scales = torch.empty(128, 0, dtype=torch.uint8)
    out = triton_mx128.grouped_wgrad_mx128_triton(values, scales, values, scales, none)
    assert out.shape == (3, 128, 128)
    assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16])
@pytest.mark.sampled(1)
def test_operands_other_than_bf16_are_refused(dtype: torch.dtype) -> None:
    weights, rows = normal(3, 64, 96).to(dtype), normal(384, 96).to(dtype)
    told = rf"operands are {dtype} and {dtype}, wanted torch\.bfloat16"
    with pytest.raises(ValueError, match=told):
        triton_bf16.grouped_mm_triton(rows, weights, ENDS, False)
    with pytest.raises(ValueError, match=told):
        triton_bf16.grouped_wgrad_triton(rows, rows, ENDS)
    with pytest.raises(ValueError, match=r"wanted torch\.bfloat16 for both"):
        triton_bf16.grouped_mm_triton(rows.bfloat16(), weights, ENDS, False)


def test_grouped_weight_gradient() -> None:
    grads, rows = draw(400, 160, spread=0.0), draw(400, 192, seed=1, spread=0.0)
    out = triton_bf16.grouped_wgrad_triton(grads, rows, ENDS)
    assert relative_error(out, grouped_wgrad_reference(grads, rows, ENDS)) < 4e-3
    assert not out[1].any()


@pytest.mark.parametrize(
    ("ends", "width", "columns"),
    [(ENDS, 256, 128), (RAGGED, 192, 61), (ENDS[2:], 256, 72)],
    ids=["whole", "ragged", "one expert"],
)
@pytest.mark.sampled(1)
def test_mx128_product_equals_the_dequantized_one(ends: Tensor, width: int, columns: int) -> None:
    rows = quantize(draw(384, width), (1, 128))
    weights = quantize(draw(len(ends), columns, width), (128, 128))
    out = triton_mx128.grouped_mm_mx128_triton(
        rows.values, rows.scales, weights.values, weights.scales, ends
    )
    wanted = grouped_mm_reference(dequantize(rows), dequantize(weights), ends)
    last = int(ends[-1])
    assert out.is_contiguous()
    assert relative_error(out[:last], wanted[:last]) < 4e-3


@pytest.mark.parametrize("ends", [ENDS, ENDS[2:]], ids=["three experts", "one expert"])
@pytest.mark.parametrize(("width_n", "width_k"), [(128, 256), (72, 91)])
@pytest.mark.sampled(1)
def test_mx128_weight_gradient_equals_the_dequantized_one(
    width_n: int, width_k: int, ends: Tensor
) -> None:
    grads, rows = draw(384, width_n), draw(384, width_k, seed=1)
    grads_t, rows_t = quantize_row_col(grads, 128)[1], quantize_row_col(rows, 128)[1]
    out = triton_mx128.grouped_wgrad_mx128_triton(
        grads_t.values, grads_t.scales, rows_t.values, rows_t.scales, ends
    )
    wanted = grouped_wgrad_reference(dequantize(grads_t).T, dequantize(rows_t).T, ends)
    assert relative_error(out, wanted) < 4e-3
    assert torch.equal(out.flatten(1).any(1), wanted.flatten(1).any(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled(1)
def test_head_scores_and_gradients(dtype: torch.dtype) -> None:
    hidden = normal(150, 96).to(dtype).requires_grad_()
    head = (normal(1300, 96, seed=1) / 8).to(dtype).requires_grad_()
    targets = torch.randint(0, 1300, (150,), generator=torch.Generator().manual_seed(2))
    logprobs, entropy, normalizer = triton_head.head_scores_triton(
        hidden.detach(), head.detach(), targets
    )
    wanted = token_logprobs_reference(hidden.double(), head.double(), targets)
    torch.testing.assert_close(logprobs.double(), wanted[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=1e-5, atol=1e-4)
    grad = normal(150, seed=3)
    expected = torch.autograd.grad(wanted[0], (hidden, head), grad.double())
    got = triton_head.head_gradient_triton(
        hidden.detach(), head.detach(), targets, normalizer, grad
    )
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    for value, gradient in zip(got, expected, strict=True):
        assert relative_error(value, gradient) < limit
