"""Settings of a decode engine: how tokens are computed (from the recipe), and what one engine holds.

Imports without torch, so that flows can read recipes.
"""

from enum import StrEnum
from typing import Self

from pydantic import NonNegativeInt, field_validator, model_validator

from ostinato.models.record import Record


class CachePolicy(StrEnum):
    """Effect of a weight swap on keys and values made by older weights."""

    KEEP = "keep"  # stay in use: training, where each token carries its version
    EXACT = "exact"  # never used: idle sessions are dropped, running requests are computed again


class Precision(StrEnum):
    """Number format of an engine's weights."""

    FP32 = "fp32"
    BF16 = "bf16"


class DecodingConfig(Record):
    """Decoding, the same in rollouts, evaluation and the gateway."""

    engine: str = "local"
    """engine of rollouts, evaluation, gateway and chat. local: ours, compiled by numba at the first
    start; vllm: vLLM (extra `vllm`), without drafts; or a name of the entry point group
    ostinato.engines; native is read as local"""
    precision: Precision = Precision.FP32
    """number format of stored matrices; bf16 takes half the memory. Our engine computes and caches in fp32 either
    way, vLLM in what this says"""
    gpus_per_replica: NonNegativeInt = 0
    """GPUs that are reserved for each engine of rollouts, over which vLLM splits the model; 0:
    none"""
    draft_layers: NonNegativeInt = 0
    """draft (multi-token prediction) layers of speculative decoding, at most those of the model;
    used where measured to pay, and no sample changes; 0: none"""
    lookup_tokens: NonNegativeInt = 0
    """draft tokens per step, at most, copied from what followed the same tokens before, in the
    context or in earlier answers; where it pays, and no sample changes; 0: none"""
    lookup_entries: NonNegativeInt = 65_536
    """places of earlier answers remembered for that, a power of two (64 bytes each); 0: none. The
    gateway always takes 0: an answer's speed must not tell a user what others were told"""

    @field_validator("engine", mode="before")
    @classmethod
    def _read_native(cls, engine: object) -> object:
        """Our engine's other name. One spelling is kept, so that both make the same fingerprint."""
        return "local" if engine == "native" else engine

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lookup_entries & (self.lookup_entries - 1):
            raise ValueError(
                f"lookup_entries is {self.lookup_entries}, wanted 0 or a power of two such as 65536"
            )
        if self.engine == "local" and self.gpus_per_replica:
            raise ValueError(
                f"gpus_per_replica is {self.gpus_per_replica} with engine 'local', wanted 0: it computes on processors"
            )
        return self


class EngineConfig(DecodingConfig):
    """Settings of one engine."""

    slots: int = 64  # sessions whose KV cache fits; also the largest decode batch
    max_context_tokens: int = 0  # 0: the model's max_sequence_tokens
    prefill_tokens_per_step: int = 384  # fed beside each decode step: decoding never starves
    cache_policy: CachePolicy = CachePolicy.KEEP
    share_prefixes: bool = True  # copy the KV cache of a session that starts with the same tokens
    speculation_max_batch: int = 8  # decoding slots above which drafting is not tried
    always_drafts: bool = False  # all draft layers in every step, for measuring their acceptance


def configure_engine(decoding: DecodingConfig, **fields: object) -> EngineConfig:
    """An engine's settings from a recipe's. `fields`: further ones of EngineConfig, or overrides."""
    return EngineConfig.model_validate(decoding.model_dump() | fields)
