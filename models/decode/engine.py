"""The decode engine: requests in, sampled tokens with log-probs, versions and routes out.

It admits requests to slots, batches them continuously with chunked prefill, reuses a session's
cache over turns and swaps weights in flight. It runs in the caller's thread, which drives it with
`step()`, and never blocks; threads, Ray and asyncio are above (infra/serving/engine).

Shapes: S slots, B decoding slots, R sampled rows, m rows per decoding slot, N rows, C positions, L
layers, K experts per token.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np
import torch

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.compiled import slots as compiled_slots
from ostinato.models.decode.compiled.loader import load_native_trunk
from ostinato.models.decode.compiled.packed import whole_vectors
from ostinato.models.decode.config import CachePolicy, EngineConfig
from ostinato.models.decode.drafts.speculation import Drafted, Speculator
from ostinato.models.decode.passes import DecodePasses, PrefillSpan, Sampled
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.decode.requests import RequestQueue, RunningRequest, check_request
from ostinato.models.decode.sampling import likeliest_tokens
from ostinato.models.decode.slots import AcceptedSamples, SlotTable
from ostinato.models.decode.weights import DecodeWeights
from ostinato.models.spec import ModelSpec

__all__ = ["CachePolicy", "DecodeEngine", "EngineConfig"]

# a request waits for a prefix of at least this length that another slot is about to feed
_WORTH_WAITING_TOKENS = 24


@dataclass(slots=True)
class EngineStatistics:
    """Totals since the engine was made. A reader subtracts two snapshots."""

    steps: int = 0
    busy_seconds: float = 0.0
    decode_only_seconds: float = 0.0  # of steps that fed no prompt
    decode_only_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens found in the cache
    occupied_slot_steps: int = 0  # sum over steps of decoding slots
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def count_step(self, decoding: int, gained: int, seconds: float, *, has_prefill: bool) -> None:
        """Adds one step."""
        self.steps += 1
        self.busy_seconds += seconds
        self.generated_tokens += gained
        self.occupied_slot_steps += decoding
        if not has_prefill:
            self.decode_only_seconds += seconds
            self.decode_only_tokens += gained

    def snapshot(self) -> dict[str, float]:
        """The totals as plain numbers."""
        return {name: float(value) for name, value in asdict(self).items()}


class DecodeEngine:
    """Continuous batching of all requests into one forward pass per step."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecodeWeights,
        config: EngineConfig,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.spec = spec
        self.config = config
        self.statistics = EngineStatistics()
        self.max_context_tokens = config.max_context_tokens or spec.max_sequence_tokens
        depth = min(config.draft_layers, spec.mtp_depth)
        drafts = depth + config.lookup_tokens  # lookup drafts may follow those of draft layers
        positions = whole_vectors(self.max_context_tokens + drafts)
        self._clock = clock
        self._slots = SlotTable(config.slots, positions, spec.vocab_size)
        self._queue = RequestQueue()
        self._running: dict[int, RunningRequest] = {}
        self._logprob_requests = 0  # running requests with top_logprobs
        self._decoding_slots_B: np.ndarray | None = None  # kept while all running requests decode
        self._drafts_with_layers = depth > 0
        self._cache = SlotCache(spec, config.slots, positions)
        rows = config.slots * (drafts + 1) + config.prefill_tokens_per_step
        native = load_native_trunk(spec, self._cache, rows)
        self._passes = DecodePasses(self._slots, self._cache, native, config.cache_policy)
        self._weights = weights
        self._speculator = Speculator(native, depth, config) if drafts else None

    @property
    def version(self) -> int:
        """Version of the weights that make the next token."""
        return self._weights.version

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._queue)

    def load(self) -> dict[str, float]:
        """Numbers of requests, and the most tokens that are still to be fed or sampled for them."""
        slots, running = self._slots, self._slots.running()
        tokens = int((slots.limit_S[running] - slots.cached_S[running]).sum()) + self._queue.tokens
        return {
            "load_tokens": float(tokens),
            "running_requests": float(len(self._running)),
            "waiting_requests": float(len(self._queue)),
        }

    def draft_acceptance(self) -> list[float]:
        """Share of draft tokens accepted per depth. Empty when the engine never drafts."""
        return [] if self._speculator is None else self._speculator.policy.acceptance()

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request. Raises ValueError for a bad field."""
        check_request(request, self.spec.vocab_size)
        self._queue.push(request)

    def sampled_tokens(self, request_id: str, start: int) -> tuple[int, ...]:
        """Tokens sampled so far for a request that holds a slot, from number `start` on."""
        for slot, running in self._running.items():
            if running.request.request_id == request_id:
                first = running.prompt_tokens + start
                return tuple(
                    self._slots.tokens_SC[slot, first : self._slots.context_S[slot]].tolist()
                )
        return ()

    def cancel(self, request_id: str) -> Generation | None:
        """Ends a request now and returns its tokens so far. None for an unknown request."""
        waiting = self._queue.remove(request_id)
        if waiting is not None:
            return _empty_generation(self.spec, waiting, StopReason.CANCELLED)
        for slot, running in self._running.items():
            if running.request.request_id == request_id:
                return self._finish(slot, StopReason.CANCELLED)
        return None

    def end_session(self, session_id: str) -> None:
        """Frees the cache of a finished conversation."""
        self._slots.forget_session(session_id)

    def swap_weights(self, weights: DecodeWeights) -> None:
        """Makes these weights compute the next token. Running requests go on."""
        self._weights = weights
        if self.config.cache_policy is CachePolicy.EXACT:
            self._slots.drop_idle()
            running = self._slots.running()
            self._slots.cached_S[running] = 0
            self._decoding_slots_B = None
            self._slots.oldest_version_S[running] = weights.version

    def step(self) -> list[Generation]:
        """Admits what fits, runs one forward pass, returns the requests that ended."""
        finished = self._admit_waiting()
        if not self._running:
            return finished
        started_at = self._clock()
        decode_slots_B, spans = self._select_rows()
        drafted = None
        if spans:
            sampled = self._passes.feed(self._weights, decode_slots_B, spans)
        else:
            drafted = self._draft(decode_slots_B)
            width = 1 if drafted is None else drafted.width
            sampled = self._passes.decode(self._weights, decode_slots_B, width)
        taken = self._take(sampled, drafted)
        if self._logprob_requests:
            _record_likeliest(self._slots, self._running, sampled, taken)
        statistics = self.statistics
        for span in spans:
            self._slots.cached_S[span.slot] = span.end
            self._slots.routed_S[span.slot] = max(self._slots.routed_S[span.slot], span.end)
            statistics.prefill_tokens += span.end - span.start
        gained = taken.gained
        if self._speculator is not None and drafted is not None:
            seconds = self._clock() - started_at
            self._speculator.record(len(decode_slots_B), drafted, seconds, gained)
        finished.extend(self._end_requests(sampled.slots, taken))
        seconds = self._clock() - started_at
        statistics.count_step(len(decode_slots_B), gained, seconds, has_prefill=bool(spans))
        return finished

    # --- admission

    def _admit_waiting(self) -> list[Generation]:
        finished = []
        for request in self._queue.by_priority():
            if len(request.token_ids) >= self.max_context_tokens or request.max_new_tokens == 0:
                is_full = len(request.token_ids) >= self.max_context_tokens
                reason = StopReason.CONTEXT if is_full else StopReason.LENGTH
                self._queue.discard(request)
                finished.append(_empty_generation(self.spec, request, reason))
                continue
            if len(self._running) == self.config.slots:
                break
            prompt_T = np.array(request.token_ids, dtype=np.int64)
            place = _find_place(
                self._slots,
                self._cache,
                request.session_id,
                prompt_T,
                self.version,
                share_prefixes=self.config.share_prefixes,
            )
            if place is None:
                continue  # wait: another slot will soon hold this prefix
            self._queue.discard(request)
            self._start(*place, prompt_T, request)
        return finished

    def _start(
        self, slot: int, reused: int, prompt_T: np.ndarray, request: GenerateRequest
    ) -> None:
        self.statistics.reused_tokens += reused
        self._slots.take(slot, request.session_id)
        self._slots.start(slot, request, prompt_T, reused, self.max_context_tokens)
        self._running[slot] = RunningRequest(request, self._clock(), len(prompt_T))
        self._logprob_requests += request.top_logprobs > 0
        self._decoding_slots_B = None

    # --- one pass

    def _select_rows(self) -> tuple[np.ndarray, list[PrefillSpan]]:
        """Slots that decode, and prompt spans within the step's budget, oldest request first."""
        if self._decoding_slots_B is not None:
            return self._decoding_slots_B, []
        slots = self._slots
        running = slots.running()
        is_fed = slots.context_S[running] - slots.cached_S[running] == 1
        if self._drafts_with_layers:  # they read the hidden state of the pass before
            is_fed &= slots.context_S[running] > slots.prompt_S[running]
        decode_slots_B, waiting = running[is_fed], running[~is_fed].tolist()
        if not waiting:
            self._decoding_slots_B = decode_slots_B
            return decode_slots_B, []
        waiting.sort(key=lambda slot: self._running[slot].started_at)
        spans, fed, budget = [], 0, self.config.prefill_tokens_per_step
        for slot in waiting:
            start = int(slots.cached_S[slot])
            end = min(int(slots.context_S[slot]), start + budget - fed)
            if end > start:
                spans.append(PrefillSpan(slot, start, end))
                fed += end - start
        return decode_slots_B, spans

    def _draft(self, decode_slots_B: np.ndarray) -> Drafted | None:
        """Writes draft tokens after the contexts. None for a plain step that need not be measured."""
        if self._speculator is None:
            return None
        drafted = self._speculator.propose(self._weights, self._slots, decode_slots_B)
        if drafted is not None:
            self.statistics.drafted_tokens += (drafted.width - 1) * len(decode_slots_B)
        return drafted

    def _take(self, sampled: Sampled, drafted: Drafted | None) -> AcceptedSamples:
        """Adds to each slot the drafts that equal the samples, and the sample after them."""
        slots_B = sampled.slots
        width = 1 if drafted is None else drafted.width
        taken = self._slots.take_samples(
            slots_B,
            sampled.tokens_R.reshape(-1, width),
            sampled.logprobs_R.reshape(-1, width),
            self.version,
        )
        speculator = self._speculator
        if speculator is None:
            return taken
        if drafted is not None and width > 1:
            self.statistics.accepted_tokens += taken.drafts_used
            if drafted.layered:
                speculator.policy.count_accepted(taken.accepted_B, drafted.layered)
        speculator.remember(slots_B, sampled.hidden_RD, taken.gained_B)
        return taken

    # --- the end of a request

    def _end_requests(self, slots_B: np.ndarray, taken: AcceptedSamples) -> list[Generation]:
        finished = []
        for index in np.flatnonzero(taken.ends_B).tolist() if taken.ended else ():
            slot = int(slots_B[index])
            running = self._running[slot]
            made = int(self._slots.context_S[slot]) - running.prompt_tokens
            reason = _stop_reason(int(taken.ends_B[index]), made, running.request)
            finished.append(self._finish(slot, reason))
        return finished

    def _finish(self, slot: int, reason: StopReason) -> Generation:
        slots, running = self._slots, self._running.pop(slot)
        self._logprob_requests -= running.request.top_logprobs > 0
        self._decoding_slots_B = None
        if self._speculator is not None:
            context_T = slots.tokens_SC[slot, : slots.context_S[slot]]
            self._speculator.learn(context_T, running.prompt_tokens)
        generation = _take_generation(slots, self._cache, slot, running, reason)
        slots.release(slot)
        return generation


def _find_place(
    slots: SlotTable,
    cache: SlotCache,
    session_id: str,
    prompt_T: np.ndarray,
    version: int,
    *,
    share_prefixes: bool,
) -> tuple[int, int] | None:
    """(slot, prompt tokens cached there). None: wait for a prefix that another slot is feeding."""
    slot = slots.session_slot(session_id)
    reused = slots.shared_prefix(slot, prompt_T) if slot is not None else 0
    if reused == 0:
        source = usable = 0
        if share_prefixes:
            source, usable, promised = slots.find_prefix_slot(prompt_T, version)
            if promised - usable >= _WORTH_WAITING_TOKENS:
                return None
        slot = slot if slot is not None else slots.vacant_slot()
        assert slot is not None, "a slot is vacant while fewer requests run than there are slots"
        if usable > 0 and source != slot:
            cache.copy_prefix(source, slot, usable)
        reused = usable
        slots.oldest_version_S[slot] = version
        slots.reported_S[slot] = 0
    assert slot is not None
    return slot, min(reused, len(prompt_T) - 1)


def _stop_reason(end: int, made_tokens: int, request: GenerateRequest) -> StopReason:
    """Stop reason of a request from the state that the slot table reports."""
    if end == compiled_slots.STOP_TOKEN:
        return StopReason.STOP_TOKEN
    if end == compiled_slots.STOP_SEQUENCE:
        return StopReason.STOP_SEQUENCE
    is_full = made_tokens < request.max_new_tokens
    return StopReason.CONTEXT if is_full else StopReason.LENGTH


def _record_likeliest(
    slots: SlotTable, running: dict[int, RunningRequest], sampled: Sampled, taken: AcceptedSamples
) -> None:
    """Records the likeliest tokens at each sampled position, for requests with `top_logprobs`."""
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


def _take_generation(
    slots: SlotTable, cache: SlotCache, slot: int, running: RunningRequest, reason: StopReason
) -> Generation:
    """The answer in a slot. It holds the routes that were not yet reported for the session."""
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


def _empty_generation(spec: ModelSpec, request: GenerateRequest, reason: StopReason) -> Generation:
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
