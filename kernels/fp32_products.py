"""Process-wide choice of the library that multiplies fp32 matrices on a CPU.

torch uses MKL, which on AMD does not use AVX-512: 90 GFLOP/s per core, while oneDNN reaches 200
with the same error. torch offers oneDNN's products only as "medium" precision, which on CPUs with
AMX rounds some shapes to bf16: on such a CPU the probe passed, and the loss of a model was off by
3e-4. CPUs with AMX therefore keep torch's choice. On others the error of a probe product decides: a
CPU's name proves nothing, and timings vary from run to run.
"""

import torch

PROBE_SIZE = 128
# fp32 sums of 128 terms of size 1 are good to about 1e-5; bf16 products miss by more than 1e-2.
LARGEST_FP32_ERROR = 1e-4


def choose_fp32_products() -> bool:
    """Switches to oneDNN's fp32 products if they are exact. Returns whether they are in use."""
    if (
        torch.cuda.is_available()
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
        or torch.cpu._is_amx_tile_supported()
    ):
        torch.set_float32_matmul_precision("highest")
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(PROBE_SIZE, PROBE_SIZE, generator=generator) for _ in range(2))
    torch.set_float32_matmul_precision("medium")
    error = (left @ right - (left.double() @ right.double()).float()).abs().max().item()
    if error > LARGEST_FP32_ERROR:
        torch.set_float32_matmul_precision("highest")
        return False
    return True
