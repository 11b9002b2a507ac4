"""Importing this module loads the Triton kernels, which register every operation's CUDA path.

It needs Triton. `load_gpu_kernels` imports it on a machine with a GPU. With TRITON_INTERPRET=1 the
same functions run on CPU tensors.
"""

from ostinato.kernels.grouped_gemm import triton_bf16, triton_mx128
from ostinato.kernels.logprobs import triton_head
from ostinato.kernels.mxfp8 import triton_quantize
from ostinato.kernels.permutation import triton_permute
from ostinato.kernels.swiglu import triton_swiglu

__all__ = [
    "triton_bf16",
    "triton_head",
    "triton_mx128",
    "triton_permute",
    "triton_quantize",
    "triton_swiglu",
]
