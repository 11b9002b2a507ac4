"""Where a trainer computes: its device, the backend of its process groups, the precision of its products.

The device is chosen by name (`choose_device`) before process groups are opened, which set it up by
`use_device`; `current_device` then tells it. Checkpoints know no device: weights and optimiser
states leave for the CPU and come from it.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels.accelerator import load_gpu_kernels
from ostinato.kernels.fp32_products import choose_fp32_products

# meta: shapes without values, for dry runs, in groups that talk to nobody
DeviceKind = Literal["cpu", "cuda", "meta"]

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "meta": "fake"}
# How tokens reach experts on other ranks, by backend. Megatron's all-to-all, which sends a token only where it goes,
# opens streams of a GPU.
TOKEN_DISPATCHERS: dict[str, Literal["allgather", "alltoall"]] = {
    "gloo": "allgather",
    "nccl": "alltoall",
    "fake": "alltoall",  # a dry run takes the path of GPUs
}
# Below it kernel launches bound a GPU: nano (1.9 M) takes longer to launch than two cores take to
# compute.
CUDA_FROM_PARAMETERS = 50_000_000
CPU = torch.device("cpu")

_device = CPU
_has_cuda: Callable[[], bool] = torch.cuda.is_available


def count_gpus() -> int:
    """GPUs visible to this process, whatever device it uses."""
    return torch.cuda.device_count() if _has_cuda() else 0


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"], *, num_parameters: int, num_ranks: int, num_gpus: int
) -> Literal["cpu", "cuda"]:
    """The kind of device for a model that `num_ranks` processes train.

    auto: CUDA for models from `CUDA_FROM_PARAMETERS` on where every rank has a GPU of its own, else the
    CPU. cuda: ValueError where the GPUs do not suffice.
    """
    if wanted == "cuda" and num_gpus < num_ranks:
        fewer = f"set the stage's world_size to {num_gpus} or " if num_gpus else "set "
        raise ValueError(
            f"device is 'cuda' and there are {num_gpus} GPUs, wanted one for each of the "
            f"{num_ranks} ranks; {fewer}OSTINATO_DEVICE=cpu"
        )
    if wanted == "auto":
        fits = num_parameters >= CUDA_FROM_PARAMETERS and num_gpus >= num_ranks
        return "cuda" if fits else "cpu"
    return wanted


def rank_device(kind: DeviceKind, rank: int) -> torch.device:
    """The device of a rank. GPUs visible to its process are assigned in turn: the ranks of a
    machine have consecutive numbers, and a Ray actor sees one GPU.
    """
    if kind != "cuda":
        return torch.device(kind)
    return torch.device(kind, rank % (count_gpus() or rank + 1))


def use_device(device: torch.device) -> None:
    """Makes `device` the one that this process trains on. Unless it is a GPU, the machine's GPUs
    are hidden from this process.
    """
    # Engines read this module too, and importing Megatron takes 4 s.
    from ostinato.models.megatron_versions import set_megatron_device  # noqa: PLC0415

    global _device
    _device = device
    cuda: Any = torch.cuda
    set_megatron_device(device)
    if device.type == "cuda":
        cuda.is_available = _has_cuda
        # what fp32_products may have chosen for a CPU means TF32 here
        torch.set_float32_matmul_precision("highest")
        torch.cuda.set_device(device)
        load_gpu_kernels()
    else:
        cuda.is_available = lambda: False
        choose_fp32_products()
        # Two OpenMP threads on a shared pair of cores train 2-4x slower than one; use ranks.
        torch.set_num_threads(1)


def current_device() -> torch.device:
    """The device of the last `use_device`. The CPU before the first."""
    return _device


def token_dispatcher(device: torch.device) -> Literal["allgather", "alltoall"]:
    """Megatron's name of the dispatcher that brings tokens to experts on other ranks."""
    return TOKEN_DISPATCHERS[BACKENDS[device.type]]


def on_device(array: np.ndarray) -> Tensor:
    """A tensor of the array on the process's device."""
    return torch.from_numpy(array).to(_device)


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """bf16 where its products are fast (on a CPU with bf16 instructions 3x as fast), else fp32."""
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32
