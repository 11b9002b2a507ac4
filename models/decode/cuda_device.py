"""What only a CUDA device can do for decoding: capture, replay, pinned copies, staging.

Owns every call into `torch.cuda` of the decode engine. Written against torch's API and never run on
a GPU: what a captured step computes is proven on the CPU and under fake CUDA tensors, the capture
itself is not. Enters: a step without arguments. Leaves: a function that replays it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WARM_UPS = 2  # products choose their algorithms and allocate workspaces before the capture
_GROUPED_CAPABILITY = (9, 0)  # below it torch's grouped product reads the offsets on the host


def check_device(device: str) -> None:
    """Raises ValueError where the engine's device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "EngineConfig.device is 'cuda' and torch sees no CUDA device, wanted one: start the "
            "engine on a machine with a GPU and a CUDA build of torch, or set device = 'cpu'"
        )


def has_grouped_products() -> bool:
    """Whether the device multiplies bf16 rows by expert without asking the host."""
    return torch.cuda.get_device_capability() >= _GROUPED_CAPABILITY


def capture_graph(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Captures a step that reads and writes fixed buffers only; returns its replay. The warm-ups run
    it for real, so its inputs must change nothing.
    """
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread may be staging weights
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay


def open_graph_pool() -> Any:
    """Memory that all graphs of an engine share: no result outlives its replay in it."""
    return torch.cuda.graph_pool_handle()


def copy_beside(tensor: Tensor, device: str) -> Tensor:
    """A copy on the device that decoding does not wait for; done when this returns."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copied = torch.empty_like(tensor, device=device).copy_(tensor)
    stream.synchronize()
    return copied


def wait_for_device() -> None:
    """Until everything that was queued is done."""
    torch.cuda.current_stream().synchronize()
