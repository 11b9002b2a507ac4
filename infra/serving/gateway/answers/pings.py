"""Streams that are never silent for long, so that no proxy on the way ends them."""

import asyncio
from collections.abc import AsyncGenerator


async def with_pings(
    events: AsyncGenerator[str, None], ping: str, silence_seconds: float
) -> AsyncGenerator[str, None]:
    """Events as they come, and a ping after each `silence_seconds` without one.

    Each event is waited for in a task of its own, which pings do not interrupt. Whoever leaves this stream
    ends `events`: at once where the next is waited for, else where the last was given.
    """

    async def read() -> str | None:
        return await anext(events, None)

    coming = None
    try:
        while True:
            coming = asyncio.create_task(read())
            while not (await asyncio.wait({coming}, timeout=silence_seconds))[0]:
                yield ping
            event = coming.result()
            if event is None:
                return
            yield event
    finally:
        if coming is None or coming.done():
            await events.aclose()
        else:
            coming.cancel()
