"""How a kernel is called: directly when eager, as a custom operation when compiled.

A call through torch's dispatcher costs tens of microseconds and its first one loads the compiler's
front end (seconds), so eager calls go straight to the function of the first argument's device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "ostinato"


class Operation:
    """One kernel with a path a device."""

    def __init__(self, name: str, cpu: Callable[..., Any], shapes: Callable[..., Any]) -> None:
        self.name = name
        self.cpu = cpu
        self.cuda: Callable[..., Any] | None = None
        self.custom = torch.library.custom_op(f"{NAMESPACE}::{name}", cpu, mutates_args=())
        self.custom.register_fake(shapes)

    def register_cuda(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the path for CUDA tensors. Usable as a decorator."""
        self.cuda = function
        self.custom.register_kernel("cuda", function)
        return function

    def __call__(self, first: Tensor, *rest: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.custom(first, *rest)
        if first.is_cuda:
            if self.cuda is None:
                raise RuntimeError(
                    f"operation {self.name} has no CUDA path: ostinato.kernels.triton_backend not imported"
                )
            return self.cuda(first, *rest)
        return self.cpu(first, *rest)


def operation(name: str, shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], Operation]:
    """Makes an `Operation` of a CPU function."""

    def wrap(cpu: Callable[..., Any]) -> Operation:
        return Operation(name, cpu, shapes)

    return wrap
