"""Checks of requests, the queue of waiting ones (first come, first served within a priority class),
and state of running ones beside the slot arrays.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ostinato.models.decode.protocol import GenerateRequest, Priority

MAX_TOP_LOGPROBS = 20  # as in OpenAI's API and vLLM


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that holds a slot."""

    request: GenerateRequest
    started_at: float
    prompt_tokens: int
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


class RequestQueue:
    """Waiting requests: users first, then evaluation, then training."""

    def __init__(self) -> None:
        self._waiting: dict[Priority, dict[str, GenerateRequest]] = {
            priority: {} for priority in Priority
        }
        self._count = 0
        self.tokens = 0  # prompt and answer tokens of all waiting requests, at most

    def __len__(self) -> int:
        return self._count

    def push(self, request: GenerateRequest) -> None:
        """Adds a request at the end of its class."""
        queue = self._waiting[request.priority]
        if request.request_id in queue:
            raise ValueError(
                f"request_id {request.request_id!r} is already waiting, wanted a new one"
            )
        queue[request.request_id] = request
        self._count += 1
        self.tokens += _tokens_at_most(request)

    def by_priority(self) -> Iterator[GenerateRequest]:
        """A snapshot, highest priority first. Entries may be discarded while iterating."""
        if not self._count:
            return
        for priority in Priority:
            yield from list(self._waiting[priority].values())

    def discard(self, request: GenerateRequest) -> None:
        """Removes an entry that was admitted or ended."""
        del self._waiting[request.priority][request.request_id]
        self._count -= 1
        self.tokens -= _tokens_at_most(request)

    def remove(self, request_id: str) -> GenerateRequest | None:
        """Removes a request by id. None when it is not waiting."""
        for queue in self._waiting.values():
            if request_id in queue:
                request = queue[request_id]
                self.discard(request)
                return request
        return None


def check_request(request: GenerateRequest, vocab_size: int) -> None:
    """Raises ValueError on a request that no engine could serve."""
    where = f"request {request.request_id!r}"
    tokens = request.token_ids
    if not tokens:
        raise ValueError(f"{where}: prompt has 0 tokens, wanted at least 1")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(
            f"{where}: token ids span {min(tokens)}..{max(tokens)}, wanted 0..{vocab_size - 1}"
        )
    if any(not 0 <= token < vocab_size for token in request.stop_token_ids):
        raise ValueError(
            f"{where}: stop_token_ids {request.stop_token_ids}, wanted 0..{vocab_size - 1}"
        )
    if request.max_new_tokens < 0:
        raise ValueError(f"{where}: max_new_tokens={request.max_new_tokens}, wanted >= 0")
    if not 0 <= request.temperature < float("inf"):
        raise ValueError(f"{where}: temperature={request.temperature}, wanted >= 0 and finite")
    if not 0 < request.top_p <= 1:
        raise ValueError(f"{where}: top_p={request.top_p}, wanted in (0, 1]")
    if request.top_k < 0:
        raise ValueError(f"{where}: top_k={request.top_k}, wanted >= 0 (0 keeps all tokens)")
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"{where}: top_logprobs={request.top_logprobs}, wanted 0..{MAX_TOP_LOGPROBS}"
        )
    for sequence in request.stop_sequences:
        if not sequence or any(not 0 <= token < vocab_size for token in sequence):
            raise ValueError(
                f"{where}: stop sequence {sequence}, wanted at least 1 token of 0..{vocab_size - 1}"
            )


def _tokens_at_most(request: GenerateRequest) -> int:
    return len(request.token_ids) + request.max_new_tokens
