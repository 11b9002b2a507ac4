"""The sandboxes of one backend: who is there, for how long, and under which key.

It knows neither boxes nor virtual machines. Belongs to one event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from ostinato.infra.platform.errors import InvalidArgument, SandboxNotFound
from ostinato.infra.sandbox.protocol import LiveSandbox, SandboxSpec


class Listed(Protocol):
    """What a roster needs to know of a sandbox."""

    @property
    def sandbox_id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def is_lost(self) -> bool: ...

    @property
    def is_expired(self) -> bool: ...

    async def close(self) -> None: ...


Box = TypeVar("Box", bound=Listed)


class Lifetime:
    """When a sandbox's time to live is over."""

    def __init__(self, clock: Callable[[], float], ttl_seconds: float) -> None:
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._ends_at = clock() + ttl_seconds

    @property
    def is_over(self) -> bool:
        """Whether it is to be reaped."""
        return self._clock() >= self._ends_at

    @property
    def left_seconds(self) -> float:
        """What is left of it; below zero when it is over."""
        return self._ends_at - self._clock()

    def renew(self, ttl_seconds: float | None = None) -> None:
        """Count from now; None: as long as at first."""
        self._ends_at = self._clock() + (ttl_seconds or self._ttl_seconds)


class Roster(Generic[Box]):
    """Live sandboxes by id, and the ones that were asked for by key."""

    def __init__(self) -> None:
        self._boxes: dict[str, Box] = {}
        self._by_key: dict[str, asyncio.Task[Box]] = {}

    def __iter__(self) -> Iterator[Box]:
        return iter(list(self._boxes.values()))

    def __len__(self) -> int:
        return len(self._boxes)

    def add(self, box: Box) -> None:
        """A sandbox that is starting or up."""
        self._boxes[box.sandbox_id] = box

    def remove(self, box: Box) -> bool:
        """Whether it was still listed; from now on it is not."""
        return self._boxes.pop(box.sandbox_id, None) is not None

    async def create_once(self, key: str, start: Callable[[], Coroutine[Any, Any, Box]]) -> Box:
        """The live sandbox of a key, started when there is none; an empty key always starts one."""
        if not key:
            return await start()
        known = self._by_key.get(key)
        if known is None or (known.done() and not _is_alive(known)):
            known = asyncio.create_task(start())
            self._by_key[key] = known
        return await asyncio.shield(known)

    def find(self, box: LiveSandbox) -> Box:
        """The same sandbox as this backend's; SandboxNotFound when it is another's or has ended."""
        found = self._boxes.get(box.sandbox_id)
        if found is None or found is not box:
            raise SandboxNotFound(f"no sandbox {box.sandbox_id} in this backend")
        return found

    def with_labels(self, labels: Mapping[str, str] | None) -> tuple[Box, ...]:
        """Those that carry all these labels."""
        wanted = (labels or {}).items()
        return tuple(
            box for box in self if all(box.spec.labels.get(name) == text for name, text in wanted)
        )

    async def reap(self) -> tuple[str, ...]:
        """Close those past their time to live and those lost; their ids."""
        ended = [box for box in self if box.is_expired or box.is_lost]
        for box in ended:
            await box.close()
        return tuple(box.sandbox_id for box in ended)

    async def close_all(self) -> None:
        """End every one."""
        for box in self:
            await box.close()


def check_count(count: int) -> None:
    """A fork makes at least one."""
    if count < 1:
        raise InvalidArgument(f"fork: count is {count}, wanted at least 1")


async def start_all(starts: Iterable[Coroutine[Any, Any, Box]]) -> tuple[Box, ...]:
    """All of them, side by side; or none, and the first failure."""
    started = await asyncio.gather(*starts, return_exceptions=True)
    failures = [item for item in started if isinstance(item, BaseException)]
    boxes = tuple(item for item in started if not isinstance(item, BaseException))
    if failures:
        for box in boxes:
            await box.close()
        raise failures[0]
    return boxes


def _is_alive(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None and not task.result().is_lost
