"""Handle of an actor whose calls run in this event loop, without Ray."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorUnavailableError


class DirectActor:
    """Handle around a plain object. Calls of the methods in `lost` fail once each, as Ray's do while the
    process of an actor is being started again.
    """

    def __init__(self, actor: object, lost: tuple[str, ...] = ()) -> None:
        self._actor = actor
        self._lost = list(lost)

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Awaitable[Any]] = getattr(self._actor, name)
        if name in self._lost:
            self._lost.remove(name)
            call = _fail

        class Method:
            @staticmethod
            def remote(*arguments: object) -> "asyncio.Future[Any]":
                return asyncio.ensure_future(call(*arguments))

        return Method


async def _fail(*_: object) -> None:
    raise ActorUnavailableError("the process is being started again", None)
