"""Starts the engine that a replica's configuration names."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.models.decode.config import EngineConfig, Precision
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
        dtype=torch.float32 if config.precision is Precision.FP32 else torch.bfloat16,
        reloads_in_place=torch.cuda.is_available(),
        name=name,
    )
