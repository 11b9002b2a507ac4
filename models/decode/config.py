"""How one decode engine batches, stores and computes.

Plain values; no behaviour beyond refusing what contradicts itself.
"""

from dataclasses import dataclass
from enum import StrEnum

from ostinato.models.decode.weights import Precision


class CachePolicy(StrEnum):
    """What a weight swap does to keys and values made by older weights."""

    KEEP = "keep"  # stay in use: training, where each token carries its version
    EXACT = "exact"  # never used: idle sessions are dropped, running requests are computed again


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine batches."""

    slots: int = 64  # sessions whose keys and values fit; also the largest decode batch
    max_context_tokens: int = 0  # 0: the model's max_sequence_tokens
    prefill_tokens_per_step: int = (
        384  # prompt tokens fed beside each decode step, so that decoding never starves
    )
    cache_policy: CachePolicy = CachePolicy.KEEP
    share_prefixes: bool = (
        True  # copy the cache of another session that starts with the same tokens
    )
    speculation_depth: int = 0  # draft tokens a step at most; 0 never drafts
    speculation_max_batch: int = 8  # decoding slots above which drafting is not tried
    # Draft tokens a step, at most, from what followed the last tokens before; 0 never.
    lookup_tokens: int = 0
    # Places of earlier answers remembered for that, for each of four lengths (16 bytes each); 0:
    # drafts come from the request's own context only.
    lookup_entries: int = 65_536
    precision: Precision = Precision.FP32  # of weights and caches; sums, norms and softmax are fp32
    # Decode steps by loops that numba compiles at the first start (seconds, then kept
    # on disk) instead of eager torch. Samples equal the eager ones up to rounding.
    native: bool = False

    def __post_init__(self) -> None:
        if self.native and self.precision is not Precision.FP32:
            raise ValueError(
                f"precision is {self.precision} with native=True, wanted {Precision.FP32}: the "
                "compiled loops are float32 only"
            )
