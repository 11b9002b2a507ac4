"""Dispatch of a kernel by the device of its first argument, and the dtype that torch's autocast gives
operands there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Operation:
    """One kernel with a path per device. Usable as a decorator of the CPU path."""

    def __init__(self, cpu: Callable[..., Any]) -> None:
        self.cpu = cpu
        self.cuda: Callable[..., Any] | None = None

    def register_cuda(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the path for CUDA tensors. Usable as a decorator."""
        self.cuda = function
        return function

    def __call__(self, first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda:
            return self.cpu(first, *rest)
        if self.cuda is None:
            raise RuntimeError(
                f"operation {self.cpu.__name__} has no CUDA path: "
                "ostinato.kernels.triton_backend was not imported"
            )
        return self.cuda(first, *rest)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The autocast dtype of the device's type. None if autocast is off or unavailable."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)
