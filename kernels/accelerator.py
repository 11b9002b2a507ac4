"""Loads the GPU kernels where there is a GPU.

A process that sees no CUDA device never loads it.
"""

import importlib

import torch


def load_gpu_kernels() -> bool:
    """Gives every operation its CUDA path. Returns whether there is a device to run it."""
    if not torch.cuda.is_available():
        return False
    importlib.import_module("ostinato.kernels.triton_backend")
    return True
