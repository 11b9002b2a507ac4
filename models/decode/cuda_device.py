"""What only a CUDA device can do for decoding: capture, replay, pinned copies, staging.

Written against torch's API and never run on a GPU: what a captured step computes is proven on the
CPU and under fake CUDA tensors, the capture itself is not.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_WARM_UPS = 2  # products choose their algorithms and allocate workspaces before the capture
_GROUPED_CAPABILITY = (9, 0)  # below it torch's grouped product reads the offsets on the host


class CudaDevice:
    """The current CUDA device and its current stream, with or without graphs."""

    name = "cuda"

    def __init__(self, *, has_graphs: bool) -> None:
        check_device(self.name)
        self.has_grouped_products = torch.cuda.get_device_capability() >= _GROUPED_CAPABILITY
        # Memory that all graphs share: no result of one outlives its replay there.
        self._pool = torch.cuda.graph_pool_handle() if has_graphs else None

    def reserve_host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Zeros in pinned memory."""
        return torch.zeros(words, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queues a copy."""
        target.copy_(source, non_blocking=True)

    def prepare(self, step: Callable[[], None]) -> Callable[[], None]:
        """Captures a step that reads and writes fixed buffers only; returns its replay."""
        if self._pool is None:
            return step
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be staging weights
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay

    def wait(self) -> None:
        """Until everything that was queued is done."""
        torch.cuda.current_stream().synchronize()


def check_device(device: str) -> None:
    """Raises ValueError where the engine's device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "EngineConfig.device is 'cuda' and torch sees no CUDA device, wanted one: start the "
            "engine on a machine with a GPU and a CUDA build of torch, or set device = 'cpu'"
        )


def copy_beside(tensor: Tensor, device: str) -> Tensor:
    """A copy on the device that decoding does not wait for; done when this returns."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copied = torch.empty_like(tensor, device=device).copy_(tensor)
    stream.synchronize()
    return copied
