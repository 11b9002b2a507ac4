"""Compiles every Triton kernel for a GPU that is not there and says what became of it.

Run: python -m tests.numerics.triton.compiled --architecture 90. Prints one JSON object a
kernel: its registers, stack and shared bytes, and how often each machine instruction occurs. Uses
the assembler and disassembler in the Triton wheel. Must not run interpreted.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.kernels.triton_backend import (
    triton_bf16,
    triton_head,
    triton_mx128,
    triton_permute,
    triton_quantize,
    triton_swiglu,
)

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", re.M)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments in order and its compile-time values."""

    kernel: Any
    types: str
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})


@dataclass(frozen=True)
class Compiled:
    """What the assembler made of a kernel."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


def tile(names: str, values: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(names.split(), values, strict=True))


def described(kind: str, *block: int) -> str:
    """Type of a tensor descriptor."""
    return f"tensordesc<{kind}[{','.join(map(str, block))}]>"


QUANTIZE = "*bf16 *fp8e4nv *u8 i32 i32"
DEQUANTIZE = "*fp8e4nv *u8 *bf16 i32 i32"
BOTH = "*bf16 *fp8e4nv *u8 *fp8e4nv *u8 i32 i32"
BLOCK_NAMES = "ROWS COLUMNS G_ROWS G_COLUMNS"
ROW, WIDE, COLUMN, WIDE_COLUMN, SQUARE = (
    tile(BLOCK_NAMES, (*triton_quantize.tile_of(*block), *block))
    for block in ((1, 32), (1, 128), (32, 1), (128, 1), (128, 128))
)
BLOCK_M, BLOCK_N, BLOCK_C = triton_bf16.TILE
PRODUCT = tile("BLOCK_M BLOCK_N BLOCK_C", triton_bf16.TILE) | {"EXPERTS": 128}
MX_M, MX_N = triton_mx128.PRODUCT_TILE
MX_GRADIENT_N, MX_GRADIENT_K = triton_mx128.GRADIENT_TILE
HEAD = tile("BLOCK_T BLOCK_V BLOCK_D", triton_head.TILE)
BIG_TILE = {"num_warps": triton_quantize.warps_of((128, 128))}

CASES = {
    "quantize_row_32": Case(triton_quantize.quantize_kernel, QUANTIZE, ROW),
    "quantize_row_128": Case(triton_quantize.quantize_kernel, QUANTIZE, WIDE),
    "quantize_column_32": Case(triton_quantize.quantize_kernel, QUANTIZE, COLUMN),
    "quantize_column_128": Case(triton_quantize.quantize_kernel, QUANTIZE, WIDE_COLUMN),
    "quantize_weight_128": Case(triton_quantize.quantize_kernel, QUANTIZE, SQUARE, BIG_TILE),
    "quantize_row_column_32": Case(
        triton_quantize.quantize_row_col_kernel,
        BOTH,
        tile("ROWS COLUMNS G", (*triton_quantize.BOTH_TILE[32], 32)),
        triton_quantize.BOTH_OPTIONS[32],
    ),
    "quantize_row_column_128": Case(
        triton_quantize.quantize_row_col_kernel,
        BOTH,
        tile("ROWS COLUMNS G", (*triton_quantize.BOTH_TILE[128], 128)),
        triton_quantize.BOTH_OPTIONS[128],
    ),
    "dequantize_32": Case(triton_quantize.dequantize_kernel, DEQUANTIZE, ROW),
    "swiglu_quantize_32": Case(
        triton_swiglu.swiglu_kernel,
        "*bf16 *fp32 *fp8e4nv *u8 i32 i32",
        tile("ROWS COLUMNS G", (*triton_swiglu.FORWARD_TILE, 32)),
    ),
    "swiglu_backward": Case(
        triton_swiglu.swiglu_backward_kernel,
        "*bf16 *bf16 *fp32 *bf16 *fp32 *bf16 i32 i32",
        tile("ROWS COLUMNS", triton_swiglu.backward_tile(2048)),
    ),
    "plan_place": Case(
        triton_permute.place_kernel,
        "*i64 *i32 *i64 *i64 i32",
        {"TOP_K": 8, "BLOCK": triton_permute.PLAN_BLOCK, "EXPERTS": 128},
        {"num_warps": triton_permute.PLAN_WARPS},
    ),
    "permute": Case(
        triton_permute.permute_kernel,
        "*bf16 *i64 *bf16 i32 i32",
        tile("ROWS COLUMNS", triton_permute.ROW_TILE),
    ),
    "unpermute": Case(
        triton_permute.unpermute_kernel,
        "*bf16 *i64 *fp32 i32 i32",
        {"TOP_K": 8} | tile("ROWS COLUMNS", triton_permute.TOKEN_TILE),
    ),
    "product": Case(
        triton_bf16.product_kernel,
        f"{described('bf16', BLOCK_M, BLOCK_C)} {described('bf16', 1, BLOCK_N, BLOCK_C)} "
        "*i32 *bf16 i32 i32 i32",
        PRODUCT | {"TRANSPOSED": False},
        triton_bf16.OPTIONS,
    ),
    "product_transposed": Case(
        triton_bf16.product_kernel,
        f"{described('bf16', BLOCK_M, BLOCK_C)} {described('bf16', 1, BLOCK_C, BLOCK_N)} "
        "*i32 *bf16 i32 i32 i32",
        PRODUCT | {"TRANSPOSED": True},
        triton_bf16.OPTIONS,
    ),
    "weight_gradient": Case(
        triton_bf16.gradient_kernel,
        f"{described('bf16', BLOCK_C, BLOCK_M)} {described('bf16', BLOCK_C, BLOCK_N)} "
        "*i32 *bf16 i32 i32 i32",
        tile("BLOCK_N BLOCK_K BLOCK_P", triton_bf16.TILE),
        triton_bf16.OPTIONS,
    ),
    "widen_scales": Case(
        triton_mx128.widen_scales_kernel,
        "*u8 *fp32 i32 i32",
        tile("ROWS COLUMNS", triton_mx128.SCALES_TILE),
    ),
    "product_mx128": Case(
        triton_mx128.product_mx128_kernel,
        f"{described('fp8e4nv', MX_M, 128)} *fp32 {described('fp8e4nv', 1, MX_N, 128)} *u8 *i32 "
        f"{described('bf16', MX_M, MX_N)} *bf16 i32 i32 i32 i32 i32",
        tile("BLOCK_M BLOCK_N", triton_mx128.PRODUCT_TILE) | {"EXPERTS": 128},
        triton_mx128.PRODUCT_OPTIONS,
    ),
    "weight_gradient_mx128": Case(
        triton_mx128.gradient_mx128_kernel,
        f"{described('fp8e4nv', MX_GRADIENT_N, 128)} *fp32 "
        f"{described('fp8e4nv', MX_GRADIENT_K, 128)} *fp32 *i32 *bf16 i32 i32 i32",
        tile("BLOCK_N BLOCK_K", triton_mx128.GRADIENT_TILE),
        triton_mx128.GRADIENT_OPTIONS,
    ),
    "head_scores": Case(
        triton_head.scores_kernel,
        "*bf16 *bf16 *i64 *fp32 i32 i32 i32 i32",
        HEAD,
        triton_head.options_of(torch.bfloat16),
    ),
    "head_gradient": Case(
        triton_head.gradient_kernel,
        "*bf16 *bf16 *i64 *fp32 *fp32 *bf16 i32 i32 i32",
        HEAD,
        triton_head.options_of(torch.bfloat16),
    ),
}


def compile_case(case: Case, architecture: int) -> Compiled:
    """Compiles, assembles, disassembles. Pointers and numbers count as multiples of 16, as real
    shapes are.
    """
    names = list(case.kernel.arg_names)
    types = case.types.split()
    runtime = [name for name in names if name not in case.constants]
    signature = dict.fromkeys(names, "constexpr")
    constants = dict(case.constants)
    attributes = {}
    for name, kind in zip(runtime, types, strict=True):
        if kind == "1":
            constants[name] = 1
            continue
        signature[name] = kind
        if not kind.startswith("tensordesc"):
            attributes[(names.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    kernel = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options=dict(case.options)
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = run_tool("nvdisasm", "-c", file.name)
        usage = USAGE.search(run_tool("cuobjdump", "-res-usage", file.name))
    if usage is None:
        raise RuntimeError("cuobjdump names no registers")
    counts = collections.Counter(INSTRUCTION.findall(code))
    return Compiled(int(usage[1]), int(usage[2]), kernel.metadata.shared, dict(counts))


def run_tool(name: str, *arguments: str) -> str:
    answer = subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True, check=True
    )
    return answer.stdout + answer.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    chosen = parser.parse_args()
    for name in chosen.only:
        compiled = compile_case(CASES[name], chosen.architecture)
        sys.stdout.write(json.dumps({"name": name} | asdict(compiled)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
