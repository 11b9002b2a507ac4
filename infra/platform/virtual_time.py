"""An asyncio loop on a virtual clock that jumps to the next timer instead of sleeping.

`run_virtual` runs work that only awaits timers and futures in virtual seconds: a simulated hour takes milliseconds
and is the same on every run. The work must not await real sockets or threads.
"""

import asyncio
from collections.abc import Coroutine
from selectors import BaseSelector, DefaultSelector
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(DefaultSelector):
    """Adds the time the loop wanted to sleep to the virtual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("virtual loop is stuck: nothing is scheduled and nothing is ready")
        self.now_seconds += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        selector: BaseSelector = self._jumping
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_seconds


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
