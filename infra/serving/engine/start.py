"""Starts the engine that a replica's configuration names."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ostinato.infra.serving.engine.local import LocalEngine, SwapReport
from ostinato.models.decode.config import EngineConfig, Precision
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.spec import ModelSpec


class ReplicaEngine(Protocol):
    """Operations that a replica needs of an engine."""

    @property
    def version(self) -> int:
        """Version of the weights served."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Lets the cache of a finished conversation go."""
        ...

    async def swap_weights(self, weights: Mapping[str, Tensor], version: int) -> SwapReport:
        """Serves `weights` from then on."""
        ...

    def statistics(self) -> dict[str, float]:
        """Running totals."""
        ...


def start_engine(
    spec: ModelSpec, weights: Mapping[str, Tensor], version: int, config: EngineConfig, name: str
) -> ReplicaEngine:
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
