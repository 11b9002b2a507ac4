"""Every kernel on one GPU in a single short run: error, time, ratio, target.

Run: python -m tests.benchmarks.kernels_gpu [--quick] [--json PATH]. Prints copy bandwidth and
cuBLAS's bf16 rate first; memory-bound kernels are compared with the one, products with the other,
both from the same run. Errors are against the references, on smaller inputs of the same kind; 0
means bit-equal. Times are medians with a cold L2. Without a CUDA device it says so and measures
nothing.

Shapes: DSv3 is K 7168, N 2048; Qwen3 is K 2048, N 768, 128 experts, top 8.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton.testing
from torch import Tensor

from ostinato.kernels.accelerator import load_gpu_kernels
from ostinato.kernels.grouped_gemm.op import grouped_mm, grouped_wgrad
from ostinato.kernels.grouped_gemm.reference import grouped_mm_reference, grouped_wgrad_reference
from ostinato.kernels.logprobs.op import token_logprobs
from ostinato.kernels.logprobs.reference import token_logprobs_reference
from ostinato.kernels.moe.grouped_mlp import grouped_mlp
from ostinato.kernels.moe.precision import PrecisionName, find_precision
from ostinato.kernels.mxfp8.op import dequantize, quantize, quantize_row_col
from ostinato.kernels.mxfp8.reference import dequantize_reference, quantize_reference
from ostinato.kernels.permutation.op import permute, plan_rows, unpermute
from ostinato.kernels.permutation.reference import plan_rows_reference
from ostinato.kernels.swiglu.op import swiglu, swiglu_backward, swiglu_quantize

COPY_ELEMENTS = 1 << 30
CUBLAS_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    error: float
    microseconds: float
    rate: float
    """TB/s or TFLOP/s, as the target's unit."""
    unit: str
    ratio: float
    must: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ratios are taken to."""

    copy_tb_per_second: float
    cublas_tflop_per_second: float


def microseconds_of(work: Callable[[], Any]) -> float:
    """Median time of a call."""
    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median")) * 1e3


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def relative_error(value: Tensor, wanted: Tensor) -> float:
    return ((value.double() - wanted.double()).norm() / wanted.double().norm()).item()


def bit_errors(*pairs: tuple[Tensor, Tensor]) -> float:
    """Share of bytes that differ."""
    different = sum((a.view(torch.uint8) != b.view(torch.uint8)).sum().item() for a, b in pairs)
    return different / sum(a.numel() * a.element_size() for a, _ in pairs)


def measure_machine() -> Machine:
    """Copy bandwidth (bytes read and written) and the bf16 product of random 8192 matrices."""
    source = torch.empty(COPY_ELEMENTS, device="cuda", dtype=torch.int16)
    target = torch.empty_like(source)
    copy = 4 * COPY_ELEMENTS / microseconds_of(lambda: target.copy_(source)) / 1e6
    left, right = normal(CUBLAS_SIZE, CUBLAS_SIZE), normal(CUBLAS_SIZE, CUBLAS_SIZE)
    product = 2 * CUBLAS_SIZE**3 / microseconds_of(lambda: left @ right) / 1e6
    return Machine(copy, product)


class Table:
    """Collects and prints rows."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        met = "yes" if row.ratio >= row.must else "NO"
        print(
            f"{row.name:44s} {row.error:9.2e} {row.microseconds:10.1f} {row.rate:9.2f} {row.unit:8s}"
            f" {row.ratio:6.2f} {row.must:5.2f} {met}",
            flush=True,
        )

    def memory(
        self, name: str, work: Callable[[], Any], num_bytes: float, must: float, error: float
    ) -> None:
        """A kernel bound by memory."""
        time_us = microseconds_of(work)
        rate = num_bytes / time_us / 1e6
        ratio = rate / self.machine.copy_tb_per_second
        self.add(Row(name, error, time_us, rate, "TB/s", ratio, must))

    def product(
        self, name: str, work: Callable[[], Any], flops: float, must: float, error: float
    ) -> float:
        """A kernel bound by arithmetic; returns its time."""
        time_us = microseconds_of(work)
        rate = flops / time_us / 1e6
        ratio = rate / self.machine.cublas_tflop_per_second
        self.add(Row(name, error, time_us, rate, "TFLOP/s", ratio, must))
        return time_us

    def relative(
        self, name: str, time_us: float, baseline_us: float, must: float, error: float = math.nan
    ) -> None:
        """A time against another kernel's."""
        ratio = baseline_us / time_us
        self.add(Row(name, error, time_us, ratio, "x", ratio, must))


def quantizing(table: Table, rows: int) -> None:
    """Kernels 1 to 5."""
    small, matrix = normal(512, 1024), normal(rows, 7168)
    elements = matrix.numel()
    for group in (32, 128):
        for label, block, must in (("row", (1, group), 0.85), ("column", (group, 1), 0.75)):
            mx = quantize(small, block)
            error = bit_errors(
                *zip((mx.values, mx.scales), quantize_reference(small, block), strict=True)
            )
            num_bytes = elements * (3 + 1 / group)
            table.memory(
                f"quantize {label} {group}",
                lambda b=block: quantize(matrix, b),
                num_bytes,
                must,
                error,
            )
        row, column = quantize_row_col(small, group)
        wanted = (
            quantize_reference(small, (1, group)),
            quantize_reference(small.T.contiguous(), (1, group)),
        )
        error = bit_errors(
            (row.values, wanted[0][0]), (row.scales, wanted[0][1]),
            (column.values, wanted[1][0]), (column.scales, wanted[1][1]),
        )  # fmt: skip
        table.memory(
            f"quantize row + transposed {group}",
            lambda g=group: quantize_row_col(matrix, g),
            elements * (4 + 2 / group), 0.75, error,
        )  # fmt: skip
    mx, mx_small = quantize(matrix, (1, 32)), quantize(small, (1, 32))
    wanted_numbers = dequantize_reference(mx_small.values, mx_small.scales, (1, 32))
    error = bit_errors((dequantize(mx_small), wanted_numbers))
    table.memory("dequantize 32", lambda: dequantize(mx), elements * (3 + 1 / 32), 0.85, error)
    weights = normal(8, 4096, 7168)
    table.memory("quantize weights 128x128", lambda: quantize(weights, (128, 128)),
                 weights.numel() * 3.0, 0.75, 0.0)  # fmt: skip


def activating(table: Table, rows: int) -> None:
    """Kernels 6 and 7."""
    inner, scale = normal(rows, 4096), normal(rows, dtype=torch.float32)
    grad, width = normal(rows, 2048), 2048
    plain = swiglu.cpu(inner[:512], scale[:512])
    error = relative_error(dequantize(swiglu_quantize(inner[:512], scale[:512], 32)), plain)
    table.memory("swiglu + quantize row 32 (error: e4m3's)", lambda: swiglu_quantize(inner, scale, 32),
                 rows * width * (5 + 1 / 32), 0.80, error)  # fmt: skip
    unfused = microseconds_of(lambda: quantize(swiglu(inner, scale), (1, 32)))
    fused = microseconds_of(lambda: swiglu_quantize(inner, scale, 32))
    table.relative("swiglu + quantize over unfused", fused, unfused, 1.6)
    table.memory("swiglu backward", lambda: swiglu_backward(grad, inner, scale),
                 rows * width * 12.0, 0.70, math.nan)  # fmt: skip


def moving(table: Table, tokens: int) -> None:
    """Kernels 8 to 10."""
    width, experts, top_k = 7168, 128, 8
    chosen = torch.topk(normal(tokens, experts, dtype=torch.float32), top_k).indices
    plan, hidden = plan_rows(chosen, experts, 128), normal(tokens, width)
    small = plan_rows(chosen[:256], experts, 128)
    place = plan_rows_reference(chosen[:256].cpu(), experts, 128)[0]
    error = (small.place_NK.cpu() != place).float().mean().item()
    rows = permute(hidden, plan)
    copies = tokens * top_k
    table.memory("permute, bf16", lambda: permute(hidden, plan), copies * width * 4.0, 0.80, error)
    table.memory("unpermute, bf16", lambda: unpermute(rows, plan),
                 copies * width * 2.0 + tokens * width * 4, 0.80, 0.0)  # fmt: skip


def even_ends(rows: int, experts: int) -> Tensor:
    """Jagged ends in steps of 128: popular experts have twice the average, one has none."""
    shares = torch.linspace(0, 2, experts)
    counts = (shares / shares.sum() * rows / 128).floor().int() * 128
    counts[-1] += rows - int(counts.sum())
    return counts.cumsum(0).to("cuda", torch.int32)


SHAPES = {"DSv3": (8, 4096, 7168), "Qwen3": (128, 1536, 2048)}
# experts on one GPU, inner width, model width, experts a token
LAYERS = {"DSv3": (8, 2048, 7168, 1), "Qwen3": (128, 768, 2048, 8)}


def multiplying(table: Table, rows: int, label: str) -> None:
    """Kernels 11 to 13, and the time that 13 is compared with."""
    experts, n, k = SHAPES[label]
    ends, flops = even_ends(rows, experts), 2.0 * rows * n * k
    x, w, dy = normal(rows, k), normal(experts, n, k) / k**0.5, normal(rows, n)
    few, few_ends = slice(0, 1024), even_ends(1024, 4)
    wanted = grouped_mm_reference(x[few].cpu(), w[:4].cpu(), few_ends.cpu())
    error = relative_error(grouped_mm(x[few], w[:4], few_ends).cpu(), wanted)
    name = f"grouped bf16 fprop {label}"
    ours = table.product(name, lambda: grouped_mm(x, w, ends), flops, 0.75, error)
    torchs = microseconds_of(lambda: torch._grouped_mm(x, w.transpose(1, 2), ends))
    table.relative(f"grouped bf16 over torch's {label}", ours, torchs, 0.95)
    wanted = grouped_mm_reference(dy[few].cpu(), w[:4].cpu().transpose(1, 2), few_ends.cpu())
    error = relative_error(grouped_mm(dy[few], w[:4], few_ends, transposed=True).cpu(), wanted)
    name = f"grouped bf16 dgrad {label}"
    table.product(name, lambda: grouped_mm(dy, w, ends, transposed=True), flops, 0.75, error)
    wanted = grouped_wgrad_reference(dy[few].cpu(), x[few].cpu(), few_ends.cpu())
    error = relative_error(grouped_wgrad(dy[few], x[few], few_ends).cpu(), wanted)
    name = f"grouped bf16 wgrad {label}"
    table.product(name, lambda: grouped_wgrad(dy, x, ends), flops, 0.65, error)
    x32, w32 = quantize(x, (1, 32)), quantize(w, (1, 32))
    time_us = microseconds_of(lambda: grouped_mm(x32, w32, ends))
    table.relative(f"mx32 fprop over bf16, with dequantize {label}", time_us, ours, 0.80)


def multiplying_scaled(table: Table, rows: int, label: str) -> None:
    """Kernels 14 and 15; quantizing is timed apart."""
    experts, n, k = SHAPES[label]
    ends, flops = even_ends(rows, experts), 2.0 * rows * n * k
    x, dy = normal(rows, k), normal(rows, n)
    w = quantize(normal(experts, n, k) / k**0.5, (128, 128))
    few, few_ends = quantize(x[:1024], (1, 128)), even_ends(1024, experts)
    wanted = grouped_mm_reference(dequantize(few).cpu(), dequantize(w).cpu(), few_ends.cpu())
    error = relative_error(grouped_mm(few, w, few_ends).cpu(), wanted)
    x_row, x_t = quantize_row_col(x, 128)
    table.product(f"mx128 fprop {label}", lambda: grouped_mm(x_row, w, ends), flops, 1.15, error)
    few_t = [quantize_row_col(part[:1024], 128)[1] for part in (dy, x)]
    plain = [dequantize(part).T.cpu() for part in few_t]
    wanted = grouped_wgrad_reference(*plain, few_ends.cpu())
    error = relative_error(grouped_wgrad(*few_t, few_ends).cpu(), wanted)
    dy_t = quantize_row_col(dy, 128)[1]
    table.product(
        f"mx128 wgrad {label}", lambda: grouped_wgrad(dy_t, x_t, ends), flops, 0.95, error
    )


def layer(table: Table, rows: int, label: str) -> None:
    """Kernel 16: routing done, everything else in, forward and backward."""
    experts, inner, width, top_k = LAYERS[label]
    tokens = normal(rows // top_k, width).requires_grad_()
    gate_up = (normal(experts, 2 * inner, width) / width**0.5).requires_grad_()
    down = (normal(experts, width, inner) / inner**0.5).requires_grad_()
    weights, chosen = torch.rand(rows // top_k, experts, device="cuda").topk(top_k)
    grad = normal(rows // top_k, width)

    def run(name: PrecisionName) -> Tensor:
        output = grouped_mlp(
            tokens,
            chosen,
            weights,
            gate_up,
            down,
            precision=find_precision(name, tokens.device),
        )
        torch.autograd.grad(output, (tokens, gate_up, down), grad)
        return output.detach()

    baseline, baseline_us = run("bf16"), microseconds_of(lambda: run("bf16"))
    for name, must in (("mx32", 0.80), ("mx128", 1.10)):
        error = relative_error(run(name), baseline)
        time_us = microseconds_of(lambda chosen_name=name: run(chosen_name))
        table.relative(f"layer {name} over bf16 {label}", time_us, baseline_us, must, error)


def head(table: Table) -> None:
    """Output matrix, log-probability, entropy."""
    tokens, width, vocabulary = 8192, 2048, 151_936
    hidden, matrix = normal(tokens, width), normal(vocabulary, width) / width**0.5
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    got = token_logprobs(hidden[:256], matrix, targets[:256])
    wanted = token_logprobs_reference(hidden[:256].double(), matrix.double(), targets[:256])
    table.product("head + log-prob + entropy", lambda: token_logprobs(hidden, matrix, targets),
                  2.0 * tokens * width * vocabulary, 0.6, relative_error(got[0], wanted[0]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    chosen = parser.parse_args()
    if not load_gpu_kernels():
        print("no CUDA device: nothing measured")
        print(json.dumps({"name": "kernels_gpu", "figures": {}, "targets": {}, "met": False}))
        sys.exit(1)
    torch.manual_seed(0)
    rows = 131_072 // (8 if chosen.quick else 1)
    machine = measure_machine()
    chip = torch.cuda.get_device_name()
    print(
        f"{chip}, torch {torch.__version__}, triton {triton.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    print(
        f"copy {machine.copy_tb_per_second:.2f} TB/s, cuBLAS bf16 {machine.cublas_tflop_per_second:.0f} TFLOP/s"
    )
    print(
        f"{'kernel':44s} {'error':>9s} {'us':>10s} {'rate':>9s} {'':8s} {'ratio':>6s} {'must':>5s}"
    )
    table = Table(machine)
    parts: tuple[Callable[[], None], ...] = (
        lambda: quantizing(table, rows),
        lambda: activating(table, rows),
        lambda: moving(table, rows // 8),
        *(lambda label=label: multiplying(table, rows // 2, label) for label in SHAPES),
        *(lambda label=label: multiplying_scaled(table, rows // 2, label) for label in SHAPES),
        *(lambda label=label: layer(table, rows // 2, label) for label in LAYERS),
        lambda: head(table),
    )
    for part in parts:
        part()
        torch.cuda.empty_cache()
    result = {
        "name": "kernels_gpu",
        "figures": {row.name: round(row.ratio, 3) for row in table.rows},
        "targets": {row.name: row.must for row in table.rows},
        "met": all(row.ratio >= row.must for row in table.rows),
    }
    if chosen.json is not None:
        full = result | {
            "chip": chip,
            "machine": asdict(machine),
            "rows": [asdict(row) for row in table.rows],
        }
        chosen.json.write_text(json.dumps(full, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
