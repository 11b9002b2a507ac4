"""An event loop's tasks, into one wait of which an exception is thrown."""

import asyncio
import types
from collections.abc import Callable, Generator
from typing import Any


class Chaos:
    """Task factory that counts the waits of all tasks made by it. Each of `at` raises its error."""

    def __init__(self) -> None:
        self.waits = 0
        self.at: dict[int, Exception] = {}

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(self._drive(coroutine), loop=loop, **named)

    @types.coroutine
    def _drive(self, coroutine: Any) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = coroutine.send
        value: Any = None
        while True:
            try:
                awaited = step(value)
            except StopIteration as end:
                return end.value
            self.waits += 1
            error = self.at.pop(self.waits, None)
            if error is not None:
                if awaited is not None:
                    awaited._asyncio_future_blocking = False
                    awaited.cancel()  # nobody waits for it any more
                step, value = coroutine.throw, error
                continue
            try:
                step, value = coroutine.send, (yield awaited)
            except BaseException as thrown:  # noqa: BLE001 - it goes on to the coroutine
                step, value = coroutine.throw, thrown
