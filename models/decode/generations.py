"""Results of requests, read from the slot arrays, and what is noted for them on the way."""

import numpy as np
import torch

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.compiled import slots as compiled_slots
from ostinato.models.decode.passes import Sampled
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.decode.requests import RunningRequest
from ostinato.models.decode.sampling import likeliest_tokens
from ostinato.models.decode.slots import SlotTable, Taken
from ostinato.models.spec import ModelSpec


def stop_reason(end: int, made_tokens: int, request: GenerateRequest) -> StopReason:
    """The reason behind an end that the slot table reports."""
    if end == compiled_slots.STOP_TOKEN:
        return StopReason.STOP_TOKEN
    if end == compiled_slots.STOP_SEQUENCE:
        return StopReason.STOP_SEQUENCE
    is_full = made_tokens < request.max_new_tokens
    return StopReason.CONTEXT if is_full else StopReason.LENGTH


def note_likeliest(
    slots: SlotTable, running: dict[int, RunningRequest], sampled: Sampled, taken: Taken
) -> None:
    """Notes the likeliest tokens beside those that a pass sampled, for the requests that want them."""
    width = len(sampled.tokens_R) // max(1, len(sampled.slots))
    for index, slot in enumerate(sampled.slots.tolist()):
        wanted, gained = running[slot].request.top_logprobs, int(taken.gained_B[index])
        if wanted and gained:
            rows = slice(index * width, index * width + gained)
            of_slot = np.full(gained, slot)
            running[slot].likeliest.extend(
                likeliest_tokens(
                    torch.from_numpy(sampled.logits_RV[rows]),
                    slots.temperature_S[of_slot],
                    slots.top_p_S[of_slot],
                    slots.top_k_S[of_slot],
                    wanted,
                )
            )


def take_generation(
    slots: SlotTable, cache: SlotCache, slot: int, running: RunningRequest, reason: StopReason
) -> Generation:
    """The answer in a slot. Routes are those not yet reported for the session."""
    request, prompt, end = running.request, running.prompt_tokens, int(slots.context_S[slot])
    offset, routed = int(slots.reported_S[slot]), int(slots.routed_S[slot])
    routes = cache.copy_routes(slot, offset, routed)
    if request.return_routes:
        slots.reported_S[slot] = routed
    else:
        routes = routes[:0]
    return Generation(
        request_id=request.request_id,
        token_ids=tuple(slots.tokens_SC[slot, prompt:end].tolist()),
        logprobs_T=slots.logprobs_SC[slot, prompt:end].copy(),
        weight_versions_T=slots.versions_SC[slot, prompt:end].copy(),
        routed_experts=routes,
        route_offset=offset,
        stop_reason=reason,
        draft_tokens_proposed=int(slots.drafts_proposed_S[slot]),
        draft_tokens_accepted=int(slots.drafts_used_S[slot]),
        oldest_cache_version=int(slots.oldest_version_S[slot]),
        likeliest_T=tuple(running.likeliest),
    )


def empty_generation(spec: ModelSpec, request: GenerateRequest, reason: StopReason) -> Generation:
    """The answer to a request that ended before its first token."""
    return Generation(
        request_id=request.request_id,
        token_ids=(),
        logprobs_T=np.zeros(0, dtype=np.float32),
        weight_versions_T=np.zeros(0, dtype=np.int64),
        routed_experts=np.zeros((0, spec.num_moe_layers, spec.experts_per_token), dtype=np.int16),
        route_offset=0,
        stop_reason=reason,
    )
