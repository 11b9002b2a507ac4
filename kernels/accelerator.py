"""Loads the GPU kernels in processes that see a CUDA device, and checks that a GPU runs the grouped
products.
"""

import importlib

import torch

# On older GPUs mx128's fp8 products do not compile, and bf16's tiles spill registers.
GROUPED_CAPABILITY = (9, 0)


def load_gpu_kernels() -> bool:
    """Registers the CUDA path of every operation if there is a CUDA device. Returns whether there is."""
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
