"""A device that does nothing before it is waited for, as a busy GPU might.

Owns `LateDevice`. Copies and steps are kept and done in order at `wait`, with what the host's
buffers hold by then; a step is run twice when it is prepared, as before a capture. It is on the CPU,
with buffers apart from the host's.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class LateDevice:
    """Everything in order, as late as possible."""

    name = "cpu"
    has_grouped_products = True

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []
        self.captures = 0
        self.waits = 0

    def reserve_host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Zeros."""
        return torch.zeros(words, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Kept for later; the target is garbage until then."""
        self._queue.append(lambda: target.copy_(source))

    def prepare(self, step: Callable[[], None]) -> Callable[[], None]:
        """Warm-ups now, replays later."""
        for _ in range(2):
            step()
        self.captures += 1
        return lambda: self._queue.append(step)

    def wait(self) -> None:
        """Does what was kept."""
        self.waits += 1
        for work in self._queue:
            work()
        self._queue.clear()
