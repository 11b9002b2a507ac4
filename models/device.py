"""Device of a trainer, backend of its process groups, and precision of its products.

`choose_device` picks the device before process groups are opened, which set it with `use_device`;
`current_device` then returns it. Checkpoints hold CPU tensors, so they do not depend on the device.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels.accelerator import load_gpu_kernels
from ostinato.kernels.fp32_products import choose_fp32_products

# meta: shapes without values, for dry runs, in groups without communication
DeviceKind = Literal["cpu", "cuda", "meta"]

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "meta": "fake"}
# Dispatcher of tokens to experts on other ranks, by backend. Megatron's all-to-all sends a token
# only to its experts' ranks, but needs a GPU's streams.
TOKEN_DISPATCHERS: dict[str, Literal["allgather", "alltoall"]] = {
    "gloo": "allgather",
    "nccl": "alltoall",
    "fake": "alltoall",  # a dry run follows the GPU path
}
# Smaller models are bound by kernel launches on a GPU: launching nano (1.9 M) takes longer than
# computing it on two cores.
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
    """Kind of device for a model that `num_ranks` processes train.

    auto: CUDA for models of at least `CUDA_FROM_PARAMETERS` if every rank has its own GPU, else the
    CPU. cuda: raises ValueError if there are too few GPUs.
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
    """The device of a rank. GPUs visible to its process are assigned in turn, since the ranks of a
    machine have consecutive numbers and a Ray actor sees one GPU.
    """
    if kind != "cuda":
        return torch.device(kind)
    return torch.device(kind, rank % (count_gpus() or rank + 1))


def use_device(device: torch.device) -> None:
    """Makes this process train on `device`. Unless it is a GPU, hides the machine's GPUs from this
    process.
    """
    # Imported here since engines import this module too, and Megatron takes 4 s to import.
    from ostinato.models.megatron_versions import set_megatron_device  # noqa: PLC0415

    global _device
    _device = device
    cuda: Any = torch.cuda
    set_megatron_device(device)
    if device.type == "cuda":
        cuda.is_available = _has_cuda
        # the setting that fp32_products may have chosen for a CPU means TF32 on a GPU
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
    """Megatron's name of the dispatcher that sends tokens to experts on other ranks."""
    return TOKEN_DISPATCHERS[BACKENDS[device.type]]


def on_device(array: np.ndarray) -> Tensor:
    """The array as a tensor on this process's device."""
    return torch.from_numpy(array).to(_device)


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """bf16 if its products are fast (3x as fast on a CPU with bf16 instructions), else fp32."""
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32
