"""Settings of a decode engine: how it computes tokens (from the recipe), and its capacity.

Imports without torch, so that flows can read recipes.
"""

from enum import StrEnum
from typing import Self

from pydantic import NonNegativeInt, field_validator, model_validator

from ostinato.models.record import Record


class CachePolicy(StrEnum):
    """Effect of a weight swap on keys and values made by older weights."""

    KEEP = "keep"  # stay in use: training, where each token carries its version
    EXACT = "exact"  # never used: idle sessions are dropped, running requests recomputed


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
    """number format of stored matrices; bf16 takes half the memory. Our engine always computes and
    caches in fp32, vLLM in this format"""
    gpus_per_replica: NonNegativeInt = 0
    """GPUs reserved for each rollout engine; vLLM splits the model over them; 0: none"""
    draft_layers: NonNegativeInt = 0
    """draft (multi-token prediction) layers of speculative decoding, at most those of the model;
    used only when measured to be faster; samples do not change; 0: none"""
    lookup_tokens: NonNegativeInt = 0
    """maximum draft tokens per step copied from text that followed the same tokens before, in the
    context or in earlier answers; used only when measured to be faster; samples do not change; 0:
    none"""
    lookup_entries: NonNegativeInt = 65_536
    """entries of earlier answers that the lookup remembers, a power of two (64 bytes each); 0:
    none. The gateway always uses 0, since the speed of an answer would reveal answers to other
    users"""

    @field_validator("engine", mode="before")
    @classmethod
    def _read_native(cls, engine: object) -> object:
        """Reads `native` as `local`, so that both spellings have the same fingerprint."""
        return "local" if engine == "native" else engine

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lookup_entries & (self.lookup_entries - 1):
            raise ValueError(
                f"lookup_entries is {self.lookup_entries}, wanted 0 or a power of two such as 65536"
            )
        if self.engine == "local" and self.gpus_per_replica:
            raise ValueError(
                f"gpus_per_replica is {self.gpus_per_replica} with engine 'local', wanted 0: it computes on CPUs"
            )
        return self


class EngineConfig(DecodingConfig):
    """Settings of one engine."""

    slots: int = 64  # sessions with a KV cache; also the largest decode batch
    max_context_tokens: int = 0  # 0: the model's max_sequence_tokens
    prefill_tokens_per_step: int = 384  # a bound, so that prompts never starve decoding
    cache_policy: CachePolicy = CachePolicy.KEEP
    share_prefixes: bool = True  # copy the KV cache of a session that starts with the same tokens
    speculation_max_batch: int = 8  # decoding slots above which drafting is not tried
    always_drafts: bool = False  # all draft layers in every step, for measuring their acceptance


def configure_engine(decoding: DecodingConfig, **fields: object) -> EngineConfig:
    """Settings of an engine from a recipe's. `fields` adds or overrides fields of EngineConfig."""
    return EngineConfig.model_validate(decoding.model_dump() | fields)
