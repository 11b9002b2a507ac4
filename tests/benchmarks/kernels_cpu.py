"""Every kernel's CPU path against the plain torch way of the same work.

Run: python -m tests.benchmarks.kernels_cpu [--quick]. One thread, nano's shapes, milliseconds of
the process's own CPU time (steady on a busy machine), best of several. `plain` is the formula
written with ordinary torch calls, and its autograd where a backward pass is part of the work.
"""

import json
import os
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.infra.platform.cluster.child import CHILD_ENVIRONMENT
from ostinato.kernels.attention.op import causal_attention
from ostinato.kernels.grouped_gemm.op import grouped_mm, grouped_wgrad
from ostinato.kernels.logprobs.op import token_logprobs
from ostinato.kernels.logprobs.reference import token_logprobs_reference
from ostinato.kernels.moe.grouped_mlp import grouped_mlp
from ostinato.kernels.moe.op import expert_mlp
from ostinato.kernels.moe.precision import GROUP, PrecisionName, find_precision
from ostinato.kernels.mxfp8.formats import Block
from ostinato.kernels.mxfp8.op import dequantize, fake_quantize, quantize
from ostinato.kernels.mxfp8.reference import dequantize_reference, quantize_reference
from ostinato.kernels.permutation.op import permute, plan_rows, unpermute
from ostinato.kernels.rms_norm.op import rms_norm
from ostinato.kernels.rms_norm.reference import rms_norm_reference
from ostinato.kernels.swiglu.op import swiglu, swiglu_backward
from ostinato.kernels.swiglu.reference import swiglu_reference
from ostinato.models.device import CPU, use_device
from tests.fakes.nano_spec import NANO

TOKENS = 2048
EXPERTS, TOP_K = NANO.num_experts, NANO.experts_per_token
WIDTH, INNER = NANO.hidden_size, NANO.expert_hidden_size
GENERATOR = torch.Generator().manual_seed(0)
# plain time over ours; below 1 the kernel would not be worth having
TARGET_RATIO = 1.0
Work = Callable[[], Any]


def best_milliseconds(work: Work, tries: int) -> float:
    """Fewest CPU milliseconds of one call."""
    work()
    times = []
    for _ in range(tries):
        started = process_time()
        work()
        times.append(process_time() - started)
    return min(times) * 1e3


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def with_backward(function: Callable[..., Any], *inputs: Tensor) -> Work:
    """The function's first result and the gradients of its floating inputs."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def work() -> None:
        result = function(*leaves)
        first = result[0] if isinstance(result, tuple) else result
        torch.autograd.grad(first, wanted, torch.ones_like(first))

    return work


class PlainRound(torch.autograd.Function):
    """Rounds by the reference on the way forward, in each layout a product reads it in."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        rounded = [dequantize_reference(*quantize_reference(matrix, b), b) for b in blocks]
        return rounded[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class PlainRoundGradient(torch.autograd.Function):
    """The same on the way back."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        ctx.blocks = blocks
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rounded = [dequantize_reference(*quantize_reference(grad, b), b) for b in ctx.blocks]
        return rounded[0], None


def plain_product(rows: Tensor, weight: Tensor, name: PrecisionName) -> Tensor:
    """rows @ weight.T with the operands that a precision reads, both ways."""
    if name == "fp32":
        return functional.linear(rows, weight)
    rows, weight = rows.bfloat16(), weight.bfloat16()
    if name != "bf16":
        group = GROUP[name]
        copies: tuple[Block, ...] = ((1, group),) if name == "mx32" else ((1, group), (group, 1))
        rows = PlainRound.apply(rows, copies)
        weight = PlainRound.apply(weight, ((1 if name == "mx32" else group, group),))
        return PlainRoundGradient.apply(functional.linear(rows, weight), copies)
    return functional.linear(rows, weight)


def plain_experts(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    name: PrecisionName = "fp32",
) -> Tensor:
    """The usual loop: each expert takes its tokens by index and adds its results."""
    output = torch.zeros_like(tokens)
    for expert in range(EXPERTS):
        token, slot = torch.where(experts == expert)
        gate, up = plain_product(tokens[token], gate_up[expert], name).float().chunk(2, dim=-1)
        result = plain_product(functional.silu(gate) * up, down[expert], name)
        output = output.index_add(0, token, result.float() * weights[token, slot, None])
    return output


def plain_grouped(rows: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    parts = [rows[a:b] @ w.T for a, b, w in zip(starts, ends, weights, strict=True)]
    return torch.cat(parts)


def plain_wgrad(grads: Tensor, rows: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    return torch.stack([grads[a:b].T @ rows[a:b] for a, b in zip(starts, ends, strict=True)])


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(
        query, key[:, None], value[:, None], is_causal=True, enable_gqa=False
    )


def quantizing_cases() -> dict[str, tuple[Work, Work]]:
    """(plain, ours) of the MXFP8 operations."""
    matrix = normal(2 * TOKENS, WIDTH, dtype=torch.bfloat16)
    cases: dict[str, tuple[Work, Work]] = {}
    for label, block in (("row 32", (1, 32)), ("column 32", (32, 1)), ("square 128", (128, 128))):
        mx = quantize(matrix, block)
        cases[f"quantize {label}"] = (
            lambda b=block: quantize_reference(matrix, b),
            lambda b=block: quantize(matrix, b),
        )
        cases[f"dequantize {label}"] = (
            lambda m=mx: dequantize_reference(m.values, m.scales, m.block),
            lambda m=mx: dequantize(m),
        )
        cases[f"fake quantize {label}"] = (
            lambda b=block: dequantize_reference(*quantize_reference(matrix, b), b),
            lambda b=block: fake_quantize(matrix, b),
        )
    return cases


def moving_cases(experts: Tensor, weights: Tensor) -> dict[str, tuple[Work, Work]]:
    """(plain, ours) of the routing and moving operations."""
    plan = plan_rows(experts, EXPERTS, 64)
    tokens = normal(TOKENS, WIDTH, dtype=torch.bfloat16)
    rows = permute(tokens, plan)
    is_token = (plan.source_P >= 0)[:, None]
    places = plan.place_NK.flatten()
    sources = torch.arange(TOKENS).repeat_interleave(TOP_K)
    inner, scale = normal(rows.shape[0], 2 * INNER, dtype=torch.bfloat16), normal(rows.shape[0])
    grad = normal(rows.shape[0], INNER, dtype=torch.bfloat16)

    def plain_swiglu_backward() -> None:
        leaves = (inner.float().requires_grad_(), scale.clone().requires_grad_())
        torch.autograd.grad(swiglu_reference(*leaves), leaves, grad.float())[0].bfloat16()

    return {
        "permute": (
            lambda: torch.where(is_token, tokens[plan.source_P.clamp(min=0)], 0),
            lambda: permute(tokens, plan),
        ),
        "unpermute": (
            lambda: torch.zeros(TOKENS, WIDTH).index_add(0, sources, rows[places].float()),
            lambda: unpermute(rows, plan),
        ),
        "swiglu": (
            lambda: swiglu_reference(inner.float(), scale).bfloat16(),
            lambda: swiglu(inner, scale),
        ),
        "swiglu backward": (plain_swiglu_backward, lambda: swiglu_backward(grad, inner, scale)),
    }


def product_cases(experts: Tensor) -> dict[str, tuple[Work, Work]]:
    """(plain, ours) of the grouped products in bf16; plain in fp32 is the line after."""
    plan = plan_rows(experts, EXPERTS, 64)
    ends, num_rows = plan.ends_E.tolist(), plan.source_P.numel()
    cases: dict[str, tuple[Work, Work]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        rows, weights, grads = (
            normal(*shape, dtype=dtype)
            for shape in ((num_rows, WIDTH), (EXPERTS, 2 * INNER, WIDTH), (num_rows, 2 * INNER))
        )
        name = str(dtype).removeprefix("torch.")
        cases[f"grouped product {name}"] = (
            lambda r=rows, w=weights: plain_grouped(r, w, ends),
            lambda r=rows, w=weights: grouped_mm(r, w, plan.ends_E),
        )
        cases[f"grouped weight gradient {name}"] = (
            lambda g=grads, r=rows: plain_wgrad(g, r, ends),
            lambda g=grads, r=rows: grouped_wgrad(g, r, plan.ends_E),
        )
    return cases


def layer_cases(experts: Tensor, weights: Tensor) -> dict[str, tuple[Work, Work]]:
    """(plain, ours) of whole layers at each precision, forward and backward."""
    inputs = (
        normal(TOKENS, WIDTH),
        experts,
        weights,
        normal(EXPERTS, 2 * INNER, WIDTH) / WIDTH**0.5,
        normal(EXPERTS, WIDTH, INNER) / INNER**0.5,
    )
    cases: dict[str, tuple[Work, Work]] = {
        "experts fp32": (
            with_backward(plain_experts, *inputs),
            with_backward(expert_mlp, *inputs),
        )
    }
    names: tuple[PrecisionName, ...] = ("bf16", "mx32", "mx128")
    for name in names:
        options = {
            "precision": find_precision(name, torch.device("cpu")),
        }
        cases[f"experts {name}"] = (
            with_backward(lambda *x, n=name: plain_experts(*x, name=n), *inputs),
            with_backward(lambda *x, o=options: grouped_mlp(*x, **o), *inputs),
        )
    hidden, head = normal(TOKENS, WIDTH), normal(NANO.vocab_size, WIDTH) / WIDTH**0.5
    targets = torch.randint(0, NANO.vocab_size, (TOKENS,), generator=GENERATOR)
    cases["head, log-prob, entropy"] = (
        with_backward(lambda h, w: token_logprobs_reference(h, w, targets), hidden, head),
        with_backward(lambda h, w: token_logprobs(h, w, targets, with_entropy=True), hidden, head),
    )
    gain = normal(WIDTH)
    cases["rms norm"] = (
        with_backward(lambda h, g: rms_norm_reference(h, g, 1e-6), hidden, gain),
        with_backward(lambda h, g: rms_norm(h, g, 1e-6), hidden, gain),
    )
    heads = (normal(16, 2, 256, 32), normal(16, 256, 32), normal(16, 256, 32))
    cases["causal attention"] = (
        with_backward(plain_attention, *heads),
        with_backward(causal_attention, *heads),
    )
    return cases


def start_anew_with_training_memory() -> None:
    """Training's processes keep freed memory; one that gives it back pays for page faults instead."""
    if not CHILD_ENVIRONMENT.items() <= os.environ.items():
        os.environ.update(CHILD_ENVIRONMENT)
        os.execv(
            sys.executable, [sys.executable, "-m", "tests.benchmarks.kernels_cpu", *sys.argv[1:]]
        )


def main() -> None:
    tries = 5 if "--quick" in sys.argv else 20
    use_device(CPU)
    scores = torch.rand(TOKENS, EXPERTS, generator=GENERATOR)
    weights, experts = scores.topk(TOP_K)
    cases = (
        quantizing_cases()
        | moving_cases(experts, weights)
        | product_cases(experts)
        | layer_cases(experts, weights)
    )
    figures = {}
    print(f"{'kernel':36s} {'plain ms':>9s} {'ours ms':>9s} {'ratio':>6s}")
    for name, (plain, ours) in cases.items():
        plain_ms, our_ms = best_milliseconds(plain, tries), best_milliseconds(ours, tries)
        figures[name] = round(plain_ms / our_ms, 2)
        print(f"{name:36s} {plain_ms:9.3f} {our_ms:9.3f} {figures[name]:6.2f}")
    targets = dict.fromkeys(figures, TARGET_RATIO)
    met = all(figures[name] >= target for name, target in targets.items())
    print(json.dumps({"name": "kernels_cpu", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    start_anew_with_training_memory()
    main()
