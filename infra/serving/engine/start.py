"""Starts the engine that a configuration names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ostinato.infra.platform.errors import StorageError, boundary
from ostinato.infra.serving.engine.extensions import ENGINES
from ostinato.infra.serving.engine.health import SwapReport
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.config import (
    CachePolicy,
    DecodingConfig,
    EngineConfig,
    configure_engine,
)
from ostinato.models.decode.protocol import StreamingClient
from ostinato.models.spec import ModelSpec


class Engine(StreamingClient, Protocol):
    """A decoder of one model with weights that can be changed while it answers. Serves one event loop."""

    @property
    def version(self) -> int:
        """Version of the weights that make the next token."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus answer."""
        ...

    async def swap_weights(self, weights: Mapping[str, Tensor], version: int) -> SwapReport:
        """Serves other weights of the same shape. EngineError, and no change, if unsound."""
        ...

    def statistics(self) -> dict[str, float]:
        """Running totals, at least `generated_tokens`."""
        ...

    def close(self) -> None:
        """Ends the engine; requests that it still holds fail with EngineError."""
        ...


def start_engine(
    spec: ModelSpec, weights: Mapping[str, Tensor], version: int, config: EngineConfig, name: str
) -> Engine:
    """The engine with its first weights. ConfigError where nothing provides it, or its extra is missing."""
    return ENGINES.load(config.engine)(spec, weights, version, config, name)


def load_engine(directory: Path, name: str, decoding: DecodingConfig, **sizes: Any) -> Engine:
    """An engine over a checkpoint's files that always answers with its own weights. `sizes` as
    `configure_engine` takes them. ConfigError as `start_engine`.
    """
    with boundary(StorageError, f"checkpoint {name} in {directory}"):
        checkpoint = load_checkpoint(directory)
    config = configure_engine(decoding, cache_policy=CachePolicy.EXACT, **sizes)
    return start_engine(checkpoint.spec, checkpoint.weights, 0, config, name)
