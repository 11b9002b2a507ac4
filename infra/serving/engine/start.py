"""The protocol of engines, streams of their tokens, and the start of the engine that a configuration names."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ostinato.infra.platform.errors import StorageError, boundary
from ostinato.infra.serving.engine.extensions import ENGINES
from ostinato.infra.serving.engine.health import SwapReport
from ostinato.models.checkpoint import open_checkpoint
from ostinato.models.decode.config import (
    CachePolicy,
    DecodingConfig,
    EngineConfig,
    configure_engine,
)
from ostinato.models.decode.protocol import Generation, StreamingClient
from ostinato.models.spec import ModelSpec
from ostinato.models.training.allocator import return_free_memory


class EngineStream:
    """A `TokenStream` of an engine in this process."""

    def __init__(self, cancel: Callable[[], Generation]) -> None:
        self.num_tokens = 0  # put in so far
        self._cancel = cancel
        self._unread: list[int] = []
        self._generation: Generation | None = None
        self._error: Exception | None = None
        self._is_changed = asyncio.Event()

    def put(self, tokens: tuple[int, ...]) -> None:
        """Adds newly sampled tokens."""
        if tokens:
            self.num_tokens += len(tokens)
            self._unread.extend(tokens)
            self._is_changed.set()

    def end(self, generation: Generation) -> None:
        """Ends the stream, after the generation's tokens that were not put in yet."""
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
            tokens, self._unread = tuple(self._unread), []
            if tokens:
                yield tokens
            if self._error is not None:
                raise self._error
            if self._generation is not None:
                return

    def close(self) -> Generation:
        """All sampled tokens. Cancels a request that still runs. Raises the error that ended the stream."""
        if self._error is not None:
            raise self._error
        if self._generation is None:
            self.end(self._cancel())
        assert self._generation is not None
        return self._generation


class Engine(StreamingClient, Protocol):
    """A decoder of one model with weights that can be changed while it answers. Serves one event loop."""

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    async def swap_weights(self, weights: Mapping[str, Tensor], version: int) -> SwapReport:
        """Serves other weights of the same shape. EngineError, and no change, if they are invalid."""
        ...

    def statistics(self) -> dict[str, float]:
        """Running totals, at least `generated_tokens`."""
        ...

    def close(self) -> None:
        """Ends the engine. Open requests fail with EngineError."""
        ...


def start_engine(
    spec: ModelSpec, weights: Mapping[str, Tensor], version: int, config: EngineConfig, name: str
) -> Engine:
    """The engine with its first weights. ConfigError when no package provides it, or its extra is missing."""
    return ENGINES.load(config.engine)(spec, weights, version, config, name)


def load_engine(directory: Path, name: str, decoding: DecodingConfig, **sizes: Any) -> Engine:
    """An engine over a checkpoint's files that always answers with the checkpoint's weights. `sizes`: arguments
    of `configure_engine`. ConfigError as in `start_engine`.
    """
    with boundary(StorageError, f"checkpoint {name} in {directory}"):
        checkpoint = open_checkpoint(directory)
    config = configure_engine(decoding, cache_policy=CachePolicy.EXACT, **sizes)
    engine = start_engine(checkpoint.spec, checkpoint.weights, 0, config, name)
    return_free_memory(0)  # memory that packing freed; evaluations run one engine per core
    return engine
