"""Where steps of fixed shapes run, behind one protocol.

A device may do what it is given later and in its own time, in the order given: only after `wait` is
a result there, and until then nothing that it reads may change.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.cuda_device import CudaDevice


class Device(Protocol):
    """What passes need of a device."""

    name: str  # as torch names it
    has_grouped_products: bool  # bf16 rows by expert, without asking the host

    def reserve_host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory that `copy` can read and write while the host does other things."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between host and device, or on the device."""
        ...

    def prepare(self, step: Callable[[], None]) -> Callable[[], None]:
        """What runs the step from now on. It may be run now, so its inputs must change nothing."""
        ...

    def wait(self) -> None:
        """Until everything given is done."""
        ...


class CpuDevice:
    """Does everything at once."""

    name = "cpu"
    has_grouped_products = True

    def reserve_host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Zeros."""
        return torch.zeros(words, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies."""
        target.copy_(source)

    def prepare(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step itself."""
        return step

    def wait(self) -> None:
        """Nothing is under way."""


def open_device(config: EngineConfig) -> Device:
    """The engine's device; ValueError where it is not there."""
    return CudaDevice(has_graphs=config.cuda_graphs) if config.device == "cuda" else CpuDevice()
