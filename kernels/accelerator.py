"""Loads the GPU kernels where there is a GPU, and says which GPUs run the grouped products.

A process that sees no CUDA device never loads them.
"""

import importlib

import torch

# mx128's fp8 products compile for no older GPU, and bf16's tiles spill registers there
GROUPED_CAPABILITY = (9, 0)


def load_gpu_kernels() -> bool:
    """Gives every operation its CUDA path. Returns whether there is a device to run it."""
    if not torch.cuda.is_available():
        return False
    importlib.import_module("ostinato.kernels.triton_backend")
    return True


def check_runs_grouped_products(device: torch.device) -> None:
    """Refuses a GPU older than Hopper. Any other device passes."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < GROUPED_CAPABILITY:
        raise ValueError(
            f"{device} has compute capability {found}, wanted {GROUPED_CAPABILITY} or more for the "
            "experts' grouped products; set precision = \"fp32\", which uses torch's products"
        )
