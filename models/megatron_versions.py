"""Patches that let Megatron-core 0.16 (Python 3.11) and 0.19 (3.12) run on any device.

Unpatched, Megatron always allocates on `torch.cuda.current_device()` and counts tokens on the
device "cuda".
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

_cuda_device: Callable[[], int] = torch.cuda.current_device
_cuda_streams: dict[str, Any] = {
    name: getattr(torch.cuda, name) for name in ("current_stream", "stream")
}


class _DeviceTorch:
    """Stand-in for `torch` in Megatron's schedules that makes zeros on the process's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: Any, **options: Any) -> Tensor:
        """`torch.zeros` on the process's device."""
        return torch.zeros(*shape, **{**options, "device": self._device})


def set_megatron_device(device: torch.device) -> None:
    """Makes Megatron compute on `device`. Unless it is a GPU, `torch.cuda.current_device` returns
    it and torch.cuda's streams are those of torch.cpu.
    """
    cuda: Any = torch.cuda
    is_cuda = device.type == "cuda"
    schedules.torch = torch if is_cuda else _DeviceTorch(device)  # type: ignore[attr-defined]
    cuda.current_device = _cuda_device if is_cuda else (lambda: device)
    # otherwise an installed Transformer Engine is used, which needs CUDA
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    # gradient sums use the current stream (0.19), token all-to-alls a stream of their own
    for name, function in _cuda_streams.items():
        setattr(cuda, name, function if is_cuda else getattr(torch.cpu, name))
    own_stream = None if is_cuda else torch.cpu.current_stream()  # None: Megatron makes it
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = own_stream  # type: ignore[assignment]
    # Megatron forks a CUDA generator for dropout under sequence parallelism; we use no dropout.
    initialize_rng_tracker(inference_rng_tracker=True)
