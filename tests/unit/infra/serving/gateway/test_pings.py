"""Streams with pings: events in order, pings in silence alone, and an end that reaches the source."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from ostinato.infra.serving.gateway.answers.translation import with_pings

pytestmark = pytest.mark.asyncio


class Source:
    """Events with pauses between them, in seconds. Keeps how it was left."""

    def __init__(self, *pauses: float, failure: Exception | None = None) -> None:
        self.pauses, self.failure, self.end = pauses, failure, ""

    async def events(self) -> AsyncGenerator[str, None]:
        try:
            for index, pause in enumerate(self.pauses):
                await asyncio.sleep(pause)
                yield f"event {index}"
            if self.failure is not None:
                raise self.failure
            self.end = "whole"
        except (GeneratorExit, asyncio.CancelledError) as left:
            await asyncio.sleep(0)  # as a record that is kept of it
            self.end = type(left).__name__
            raise


async def test_pings_come_in_silence_and_change_no_event() -> None:
    source = Source(0, 0.25, 0, 0)
    seen = [event async for event in with_pings(source.events(), "ping", 0.1)]
    assert seen == ["event 0", "ping", "ping", "event 1", "event 2", "event 3"]
    assert source.end == "whole"


async def test_a_failure_passes_through() -> None:
    stream = with_pings(Source(0, failure=ValueError("why")).events(), "ping", 1)
    assert await anext(stream) == "event 0"
    with pytest.raises(ValueError, match="why"):
        await anext(stream)


@pytest.mark.parametrize("last", ["event 0", "ping"])
async def test_whoever_leaves_ends_the_source(last: str) -> None:
    source = Source(0, 60)
    stream = with_pings(source.events(), "ping", 0.01)
    while await anext(stream) != last:
        pass
    await stream.aclose()
    await asyncio.sleep(0.01)
    assert source.end in ("GeneratorExit", "CancelledError")


async def test_a_reader_that_is_cancelled_ends_the_source() -> None:
    source = Source(60)

    async def read() -> None:
        async for _ in with_pings(source.events(), "ping", 60):
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.sleep(0.01)
    assert source.end == "CancelledError"
