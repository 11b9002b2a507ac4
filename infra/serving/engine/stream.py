"""Tokens of one generation on their way to a reader.

`EngineStream`: the engine's loop puts tokens in after each step. A slow reader does not delay it: it
gets several tokens at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from ostinato.models.decode.protocol import Generation


class EngineStream:
    """A `TokenStream` of an engine in this process."""

    def __init__(self, cancel: Callable[[], Generation]) -> None:
        self.num_tokens = 0  # put in so far
        self._cancel = cancel
        self._fresh: list[int] = []
        self._generation: Generation | None = None
        self._error: Exception | None = None
        self._is_changed = asyncio.Event()

    def put(self, tokens: tuple[int, ...]) -> None:
        """Adds tokens that were sampled after those put in before."""
        if tokens:
            self.num_tokens += len(tokens)
            self._fresh.extend(tokens)
            self._is_changed.set()

    def end(self, generation: Generation) -> None:
        """Ends the stream. Tokens that were not put in yet are taken from the generation."""
        self.put(generation.token_ids[self.num_tokens :])
        self._generation = generation
        self._is_changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, which the reader raises."""
        self._error = error
        self._is_changed.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, ...]]:
        while True:
            await self._is_changed.wait()
            self._is_changed.clear()
            tokens, self._fresh = tuple(self._fresh), []
            if tokens:
                yield tokens
            if self._error is not None:
                raise self._error
            if self._generation is not None:
                return

    def close(self) -> Generation:
        """Everything that was sampled. Cancels a request that still runs. Raises the error that ended the engine."""
        if self._error is not None:
            raise self._error
        if self._generation is None:
            self.end(self._cancel())
        assert self._generation is not None
        return self._generation
