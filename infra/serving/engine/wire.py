"""Requests and generations as plain tuples, the form that crosses process boundaries cheaply.

A tuple of ints, strings and bytes pickles several times faster than a dataclass with arrays, and
Ray keeps a small answer inline. Bytes of arrays travel with their shapes; dtypes are fixed by the
protocol.
"""

import numpy as np

from ostinato.models.decode.protocol import GenerateRequest, Generation, Priority, StopReason

RequestTuple = tuple[
    str,
    str,
    bytes,
    int,
    tuple[int, ...],
    float,
    float,
    int,
    str,
    bool,
    int,
    tuple[tuple[int, ...], ...],
]
GenerationTuple = tuple[
    str, bytes, bytes, bytes, bytes, tuple[int, ...], int, str, float, float, int, int
]


def encode_request(request: GenerateRequest) -> RequestTuple:
    """A request as plain values."""
    return (
        request.request_id,
        request.session_id,
        np.array(request.token_ids, dtype=np.int32).tobytes(),
        request.max_new_tokens,
        request.stop_token_ids,
        request.temperature,
        request.top_p,
        request.seed,
        request.priority.value,
        request.return_routes,
        request.top_k,
        request.stop_sequences,
    )


def decode_request(values: RequestTuple) -> GenerateRequest:
    """Inverse of encode_request."""
    (
        request_id,
        session_id,
        tokens,
        limit,
        stops,
        temperature,
        top_p,
        seed,
        priority,
        return_routes,
        top_k,
        stop_sequences,
    ) = values
    return GenerateRequest(
        request_id=request_id,
        session_id=session_id,
        token_ids=tuple(np.frombuffer(tokens, dtype=np.int32).tolist()),
        max_new_tokens=limit,
        stop_token_ids=stops,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        priority=Priority(priority),
        return_routes=return_routes,
        top_k=top_k,
        stop_sequences=stop_sequences,
    )


def encode_generation(generation: Generation) -> GenerationTuple:
    """A generation as plain values."""
    return (
        generation.request_id,
        np.array(generation.token_ids, dtype=np.int32).tobytes(),
        generation.logprobs_T.tobytes(),
        generation.weight_versions_T.tobytes(),
        generation.routed_experts.tobytes(),
        generation.routed_experts.shape,
        generation.route_offset,
        generation.stop_reason.value,
        generation.queued_seconds,
        generation.generate_seconds,
        generation.draft_tokens_proposed,
        generation.draft_tokens_accepted,
    )


def decode_generation(values: GenerationTuple) -> Generation:
    """Inverse of encode_generation."""
    (
        request_id,
        tokens,
        logprobs,
        versions,
        routes,
        shape,
        offset,
        reason,
        queued,
        generating,
        proposed,
        accepted,
    ) = values
    return Generation(
        request_id=request_id,
        token_ids=tuple(np.frombuffer(tokens, dtype=np.int32).tolist()),
        logprobs_T=np.frombuffer(logprobs, dtype=np.float32),
        weight_versions_T=np.frombuffer(versions, dtype=np.int64),
        routed_experts=np.frombuffer(routes, dtype=np.int16).reshape(shape),
        route_offset=offset,
        stop_reason=StopReason(reason),
        queued_seconds=queued,
        generate_seconds=generating,
        draft_tokens_proposed=proposed,
        draft_tokens_accepted=accepted,
    )
