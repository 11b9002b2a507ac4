"""What a CUDA graph can hold, checked operation by operation without a GPU.

Owns `CaptureRules`. Under it every operation torch dispatches is recorded; one whose result's shape
or value the host would have to read, and one that touches a tensor elsewhere than on the step's
device, is kept as broken. With fake CUDA tensors (`FakeTensorMode`) this sees each mix-up of devices
and each copy from or to host memory; with real CPU tensors, what the step does on real numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CaptureRules(TorchDispatchMode):
    """Records operations with their shapes, and what of it a graph could not hold."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.operations: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.broken: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        read = _READS & set(func.tags)
        if read:
            self.broken.append(f"{name} is read by the host ({read})")
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.device.type != self._device:
                self.broken.append(f"{name} touches {tensor.device}, wanted {self._device}")
        self.operations.append((name, tuple(tuple(tensor.shape) for tensor in tensors)))
        return result


def broken_rules(step: Callable[[], Any], device: str) -> list[str]:
    """What of a step no graph could hold; an error inside the step counts."""
    with CaptureRules(device) as rules:
        try:
            step()
        except (RuntimeError, TypeError, ValueError) as error:  # what fake tensors refuse
            rules.broken.append(f"{type(error).__name__}: {error}")
    return rules.broken
