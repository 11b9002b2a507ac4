"""Starts the engine that a configuration names."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.infra.platform.errors import ConfigError, StorageError, boundary
from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.config import (
    CachePolicy,
    DecodingConfig,
    EngineConfig,
    Precision,
    configure_engine,
)
from ostinato.models.spec import ModelSpec

if TYPE_CHECKING:
    from ostinato.infra.serving.engine.vllm_client import VllmEngine


def start_engine(
    spec: ModelSpec, weights: Mapping[str, Tensor], version: int, config: EngineConfig, name: str
) -> "LocalEngine | VllmEngine":
    """The engine with its first weights. ModuleNotFoundError where vLLM is asked for and missing."""
    if config.engine == "local":
        return LocalEngine(spec, weights, version, config, name)
    from ostinato.infra.serving.engine.vllm_client import VllmEngine  # noqa: PLC0415 - an extra

    return VllmEngine(
        spec,
        weights,
        version,
        slots=config.slots,
        max_context_tokens=config.max_context_tokens,
        gpus=config.gpus_per_replica,
        dtype=torch.float32 if config.precision is Precision.FP32 else torch.bfloat16,
        reloads_in_place=torch.cuda.is_available(),
        name=name,
    )


def load_engine(
    directory: Path, name: str, decoding: DecodingConfig, **sizes: Any
) -> "LocalEngine | VllmEngine":
    """An engine over a checkpoint's files that always answers with its own weights. `sizes` as
    `configure_engine` takes them. ConfigError where vLLM is asked for and missing.
    """
    with boundary(StorageError, f"checkpoint {name} in {directory}"):
        checkpoint = load_checkpoint(directory)
    config = configure_engine(decoding, cache_policy=CachePolicy.EXACT, **sizes)
    try:
        return start_engine(checkpoint.spec, checkpoint.weights, 0, config, name)
    except ModuleNotFoundError as missing:
        raise ConfigError(f'[decoding] engine = "vllm": {missing}') from None
