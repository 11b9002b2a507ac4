"""Contract between clients that want tokens and engines that sample them: the records of a request
and its answer, and the `ModelClient` protocol that rollout workers, evaluation and the gateway use.

Shapes: T new tokens, P prompt tokens, L MoE layers, K experts per token.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np


class StopReason(StrEnum):
    """Reason for the end of a generation."""

    STOP_TOKEN = "stop_token"  # a stop token was sampled; it is the last of token_ids
    STOP_SEQUENCE = "stop_sequence"  # the last tokens of token_ids are a stop sequence
    LENGTH = "length"  # max_new_tokens were sampled
    CONTEXT = "context"  # prompt plus answer filled the context window
    CANCELLED = "cancelled"  # the caller gave up


class Priority(StrEnum):
    """Priority of waiting requests when an engine is full, highest first."""

    USER = "user"
    EVALUATION = "evaluation"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Tokens of conversation `session_id` may still be in the KV cache."""

    request_id: str
    session_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    priority: Priority = Priority.TRAINING
    return_routes: bool = True
    top_k: int = 0  # only the k likeliest tokens may be sampled, applied before top_p; 0: all
    # Token sequences that end the answer. A match never begins in the prompt. Its tokens stay in
    # the answer, like a stop token: they were sampled, so they are trained.
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int = 0  # likeliest tokens reported with each sampled token


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled tokens of a request. All arrays are parallel to token_ids (T) unless said otherwise."""

    request_id: str
    token_ids: tuple[int, ...]
    # float32, natural log, of the sampled token under the sampling distribution
    logprobs_T: np.ndarray
    weight_versions_T: np.ndarray  # int64, version of the weights that made each token
    # int16 [P_new + T, L, K]: experts of every position not yet reported to this session, in order.
    # route_offset is the index of the first row in the whole context (prompt + new tokens), so the
    # rows cover positions route_offset .. route_offset + rows, and rows of successive turns follow
    # one another. The last sampled token has no row until the next turn feeds it. If a session's
    # cache was lost, earlier positions are reported again, from newer weights; the rows recorded
    # first belong to the log-probs.
    routed_experts: np.ndarray
    route_offset: int
    stop_reason: StopReason
    draft_tokens_proposed: int = 0
    draft_tokens_accepted: int = 0
    # Oldest weight version of the keys and values that the tokens were sampled from. None: each
    # token's own version, from an engine that keeps no cache over a swap.
    oldest_cache_version: int | None = None
    # (token, log-probability), likeliest first, under the sampling distribution; shorter if fewer
    # tokens can be drawn. Empty unless the request asked for them.
    likeliest_T: tuple[tuple[tuple[int, float], ...], ...] = ()

    def first(self, num_tokens: int) -> "Generation":
        """The generation cut to its first `num_tokens` tokens, with the same stop reason."""
        dropped = len(self.token_ids) - num_tokens
        if dropped == 0:
            return self
        num_rows = max(0, len(self.routed_experts) - dropped)
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs_T=self.logprobs_T[:num_tokens],
            weight_versions_T=self.weight_versions_T[:num_tokens],
            routed_experts=self.routed_experts[:num_rows],
            likeliest_T=self.likeliest_T[:num_tokens],
        )


class ModelClient(Protocol):
    """Source of generations: an engine, a fleet of replicas, a scripted model in tests."""

    async def generate(self, request: GenerateRequest) -> Generation: ...

    async def end_session(self, session_id: str) -> None:
        """Lets the engine drop the cache of a finished conversation."""
        ...


class TokenStream(Protocol):
    """One generation while it is sampled. It ends when iteration does, or at `close`."""

    def __aiter__(self) -> AsyncIterator[tuple[int, ...]]:
        """New tokens as they are sampled, several at once if drafts held or the reader lagged."""
        ...

    def close(self) -> Generation:
        """Returns everything that was sampled. A generation that still runs is cancelled."""
        ...


@runtime_checkable
class StreamingClient(ModelClient, Protocol):
    """A client that also streams tokens as they are sampled."""

    def stream(self, request: GenerateRequest) -> TokenStream: ...
