"""What the assembler makes of every Triton kernel, on a machine without a GPU: tensor-core
instructions, no spilled registers, registers under a ceiling, loads of whole tiles or of 128 bits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEAD = ("head_scores", "head_gradient")
PRODUCTS = ("product", "product_transposed", "weight_gradient", *HEAD)
SCALED_PRODUCTS = ("product_mx128", "weight_gradient_mx128")
# Kernels bound by memory: with 128 registers a thread 16 warps of 4 fit a multiprocessor.
# Placing rows, int64 indices and scales load words, not vectors.
MEMORY_REGISTERS = 128
NARROW = ("plan_place", "unpermute", "widen_scales")
# A thread has at most 255; accumulators of a 128 x 256 tile over 256 threads take 128 of them.
PRODUCT_REGISTERS = 255


def compile_all(architecture: int, cache: Path) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.numerics.triton.compiled",
            "--architecture",
            str(architecture),
        ],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    kernels = [json.loads(line) for line in answer.stdout.splitlines()]
    return {kernel["name"]: kernel for kernel in kernels}


def count(kernel: dict[str, Any], *parts: str) -> int:
    """Instructions whose name starts with the first part and contains the others."""
    return sum(
        number
        for name, number in kernel["instructions"].items()
        if name.startswith(parts[0]) and all(part in name for part in parts[1:])
    )


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_hopper_code_uses_tensor_cores_and_wide_loads_and_spills_nothing(tmp_path: Path) -> None:
    kernels = compile_all(90, tmp_path)
    for name, kernel in kernels.items():
        assert kernel["stack_bytes"] == 0, name
        assert count(kernel, "LDL") + count(kernel, "STL") == 0, name
        is_product = name in PRODUCTS + SCALED_PRODUCTS
        assert kernel["registers"] <= (PRODUCT_REGISTERS if is_product else MEMORY_REGISTERS), name
        if name in HEAD:
            assert count(kernel, "LDGSTS", "128") > 0, name
        elif is_product:
            assert count(kernel, "UTMALDG") > 0, name
            assert count(kernel, "LDGSTS") == 0, name
        elif name not in NARROW:
            assert count(kernel, "LDG", "128") > 0, name
    for name in PRODUCTS:
        assert count(kernels[name], "HGMMA") > 0, name
    for name in SCALED_PRODUCTS:
        assert count(kernels[name], "QGMMA") > 0, name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_blackwell_code_uses_its_tensor_cores_and_spills_nothing(tmp_path: Path) -> None:
    kernels = compile_all(100, tmp_path)
    for name, kernel in kernels.items():
        assert kernel["stack_bytes"] == 0, name
    for name in PRODUCTS:
        assert count(kernels[name], "UTC", "HMMA") > 0, name
    for name in SCALED_PRODUCTS:
        assert count(kernels[name], "UTC", "QMMA") > 0, name
