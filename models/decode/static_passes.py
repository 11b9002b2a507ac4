"""Passes of fixed shapes on one device: on CUDA as captured graphs.

`StaticPasses`: the choice of buckets, the packed buffers, one graph a bucket captured at its first
use, and the weights in buffers that a swap overwrites in place, so that no graph is captured twice.
A step is one pass for all decode rows and one for each length of prompt spans; each is one copy in
and one out, and the host waits once, at the end. On the CPU the same steps run uncaptured.

Shapes: B decoding slots, A segments, W rows a segment, R sampled rows, N rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from ostinato.models.decode.batch import PrefillSpan
from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.device import Device
from ostinato.models.decode.passes import Sampled, completed, store_routes
from ostinato.models.decode.slots import SlotTable
from ostinato.models.decode.speculation import Drafted
from ostinato.models.decode.static_cache import StaticCache
from ostinato.models.decode.static_layout import (
    SMALLEST_CONTEXT,
    SMALLEST_SPAN,
    Bucket,
    StepInputs,
    StepOutputs,
    clear_inputs,
    round_up,
    split_outputs,
)
from ostinato.models.decode.static_trunk import StaticTrunk
from ostinato.models.decode.weights import DecodeWeights, Precision, list_tensors, map_tensors
from ostinato.models.spec import ModelSpec

_GROUPED_ALIGNMENT_ELEMENTS = 8  # of bf16: grouped_mm wants strides of 16 bytes


@dataclass(frozen=True, slots=True)
class _Pass:
    """A bucket's buffers and how it is run."""

    inputs: StepInputs  # on the host
    outputs: StepOutputs  # on the host, sound once the device is done
    launch: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A pass under way."""

    bucket: Bucket
    done: StepOutputs
    slots: np.ndarray  # of its real segments
    segments: np.ndarray  # where they are
    first: np.ndarray
    lengths: np.ndarray


class StaticPasses:
    """Passes over a `StaticCache`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecodeWeights,
        config: EngineConfig,
        table: SlotTable,
        cache: StaticCache,
        device: Device,
        *,
        drafts: bool,
    ) -> None:
        self._spec, self._config = spec, config
        self._table, self._cache = table, cache
        self._device = device
        self._weights = map_tensors(
            weights, lambda tensor: torch.empty_like(tensor, device=device.name)
        )
        self._tensors = list_tensors(self._weights)
        is_bf16 = weights.embedding_VD.dtype is torch.bfloat16
        if is_bf16:
            _check_alignment(spec)
        self._trunk = StaticTrunk(
            spec,
            cache,
            device.name,
            is_grouped=is_bf16 and device.has_grouped_products,
            drafts=drafts,
        )
        self._passes: dict[Bucket, _Pass] = {}

    @property
    def buckets(self) -> list[Bucket]:
        """Those met so far, in the order they were met."""
        return list(self._passes)

    def load(self, weights: DecodeWeights) -> DecodeWeights:
        """Overwrites the weights where they are, and returns those: the given ones may be dropped.
        ValueError when they are of another layout; nothing is overwritten then.
        """
        for kept, new in zip(self._tensors, list_tensors(weights), strict=True):
            if kept.shape != new.shape or kept.dtype is not new.dtype:
                raise ValueError(
                    f"weights version {weights.version}: a tensor is {tuple(new.shape)} {new.dtype}"
                    f", wanted {tuple(kept.shape)} {kept.dtype} as in the version before"
                )
        for kept, new in zip(self._tensors, list_tensors(weights), strict=True):
            self._device.copy(kept, new)
        self._device.wait()  # else their memory could be given away before it is read
        self._weights = replace(self._weights, version=weights.version)
        return self._weights

    def run(
        self,
        weights: DecodeWeights,
        decode_slots_B: np.ndarray,
        spans: Sequence[PrefillSpan],
        drafted: Drafted | None,
    ) -> Sampled:
        """Feeds all rows and samples after every decode row and completed prompt."""
        assert weights is self._weights, "passes run what they loaded"
        known, launched = len(self._passes), []
        if len(decode_slots_B):
            launched.append(self._launch_decode(decode_slots_B, drafted))
        for width, group in _by_width(spans, self._most_span_rows).items():
            launched.append(self._launch_spans(width, group))
        self._device.wait()
        for one in launched:
            self._store_routes(one)
        slots, tokens, logprobs = [], [], []
        if len(decode_slots_B):
            width = launched[0].bucket.width
            slots.append(decode_slots_B)
            self._collect(launched[0], tokens, logprobs, width)
            if launched[0].bucket.drafted:
                self._write_drafts(launched[0])
        ended = {span.slot for span in completed(self._table, spans)}
        for one in launched[bool(len(decode_slots_B)) :]:
            is_ended = np.array([slot in ended for slot in one.slots.tolist()])
            kept = replace(one, slots=one.slots[is_ended], segments=one.segments[is_ended])
            slots.append(kept.slots)
            self._collect(kept, tokens, logprobs, 1)
        return Sampled(
            slots=np.concatenate(slots),
            tokens_R=np.concatenate(tokens),
            logprobs_R=np.concatenate(logprobs),
            hidden_RD=None,
            is_first_of_shape=len(self._passes) > known,
        )

    @property
    def _most_span_rows(self) -> int:
        rows = SMALLEST_SPAN
        while rows < self._config.prefill_tokens_per_step:
            rows *= 2
        return rows

    def _launch_decode(self, slots_B: np.ndarray, drafted: Drafted | None) -> _Launched:
        """One pass for all decode rows; where the slots are among the first ones each lies at its
        own place.
        """
        table = self._table
        width = 1 if drafted is None else drafted.width
        first_B = table.cached_S[slots_B]
        segments = round_up(len(slots_B), 1, self._config.slots)
        is_in_place = int(slots_B.max()) < segments
        bucket = Bucket(
            segments=segments,
            width=width,
            context=self._context(int(first_B.max()) + width),
            samples_every_row=True,
            is_in_place=is_in_place,
            is_limited=self._is_limited(slots_B),
            drafted=0 if drafted is None else drafted.layered,
        )
        places = slots_B if is_in_place else np.arange(len(slots_B))
        return self._launch(bucket, slots_B, places, first_B, np.full(len(slots_B), width))

    def _launch_spans(self, width: int, spans: list[PrefillSpan]) -> _Launched:
        """One pass for spans of about one length."""
        slots = np.array([span.slot for span in spans])
        bucket = Bucket(
            segments=round_up(len(spans), 1, self._config.slots),
            width=width,
            context=self._context(max(span.end for span in spans)),
            samples_every_row=False,
            is_in_place=False,
            is_limited=self._is_limited(slots),
        )
        first = np.array([span.start for span in spans])
        lengths = np.array([span.end - span.start for span in spans])
        return self._launch(bucket, slots, np.arange(len(spans)), first, lengths)

    def _context(self, needed: int) -> int:
        return round_up(needed, SMALLEST_CONTEXT, self._cache.positions)

    def _is_limited(self, slots: np.ndarray) -> bool:
        return bool((self._table.top_p_S[slots] < 1).any() or self._table.top_k_S[slots].any())

    def _launch(
        self,
        bucket: Bucket,
        slots: np.ndarray,
        segments: np.ndarray,
        first: np.ndarray,
        lengths: np.ndarray,
    ) -> _Launched:
        """Fills the inputs and starts the step. A bucket is used once a step, so that nothing
        overwrites what the device still reads.
        """
        if bucket not in self._passes:
            self._passes[bucket] = self._make_pass(bucket)
        made, table = self._passes[bucket], self._table
        inputs = {
            field.name: getattr(made.inputs, field.name).numpy() for field in fields(StepInputs)
        }
        inputs["lengths_A"][:] = 0
        inputs["slots_A"][:] = self._cache.scratch_slot
        inputs["first_A"][:] = 0
        positions = first[:, None] + np.arange(bucket.width)
        positions = np.minimum(positions, self._cache.positions - 1)
        inputs["tokens_AW"][segments] = table.tokens_SC[slots[:, None], positions]
        inputs["slots_A"][segments] = slots
        inputs["first_A"][segments] = first
        inputs["lengths_A"][segments] = lengths
        inputs["seed_keys_A"][segments] = table.seed_keys_S[slots].view(np.int64)
        inputs["temperature_A"][segments] = table.temperature_S[slots]
        inputs["top_p_A"][segments] = table.top_p_S[slots]
        inputs["top_k_A"][segments] = table.top_k_S[slots]
        made.launch()
        return _Launched(bucket, made.outputs, slots, segments, first, lengths)

    def _make_pass(self, bucket: Bucket) -> _Pass:
        """Buffers of a bucket, and its graph where there are graphs."""
        spec, device = self._spec, self._device
        host_in = device.reserve_host(bucket.input_words, torch.int64)
        host_out = device.reserve_host(bucket.output_words(spec), torch.int32)
        inputs = clear_inputs(bucket, host_in, self._cache.scratch_slot)
        device_in = host_in.to(device.name, copy=True)
        device_out = torch.zeros_like(host_out, device=device.name)
        run_step = device.prepare(
            lambda: self._trunk.run(bucket, self._weights, device_in, device_out)
        )

        def launch() -> None:
            device.copy(device_in, host_in)
            run_step()
            device.copy(host_out, device_out)

        return _Pass(inputs, split_outputs(bucket, spec, host_out), launch)

    def _collect(
        self, one: _Launched, tokens: list[np.ndarray], logprobs: list[np.ndarray], width: int
    ) -> None:
        """Takes the real segments' samples."""
        for kept, drawn_R in ((tokens, one.done.tokens_R), (logprobs, one.done.logprobs_R)):
            kept.append(drawn_R.numpy().reshape(-1, width)[one.segments].reshape(-1))

    def _write_drafts(self, one: _Launched) -> None:
        """Puts the drafts that the step made behind the contexts, as drafting on the host does."""
        drafts = one.done.drafts_AQ.numpy()[one.segments]
        places = self._table.context_S[one.slots][:, None] + np.arange(drafts.shape[1])
        self._table.tokens_SC[one.slots[:, None], places] = drafts

    def _store_routes(self, one: _Launched) -> None:
        steps_W = np.arange(one.bucket.width)
        is_real = steps_W < one.lengths[:, None]
        rows = (one.segments[:, None] * one.bucket.width + steps_W)[is_real]
        slots_N = np.broadcast_to(one.slots[:, None], is_real.shape)[is_real]
        positions_N = (one.first[:, None] + steps_W)[is_real]
        routes_NLK = one.done.routes_NLK[torch.from_numpy(rows)]
        store_routes(
            self._cache, self._table, self._config.cache_policy, slots_N, positions_N, routes_NLK
        )


def _by_width(spans: Sequence[PrefillSpan], most: int) -> dict[int, list[PrefillSpan]]:
    """Spans by the bucket of their length."""
    groups: dict[int, list[PrefillSpan]] = {}
    for span in spans:
        width = round_up(span.end - span.start, SMALLEST_SPAN, most)
        groups.setdefault(width, []).append(span)
    return groups


def _check_alignment(spec: ModelSpec) -> None:
    for name in ("hidden_size", "expert_hidden_size"):
        if getattr(spec, name) % _GROUPED_ALIGNMENT_ELEMENTS:
            raise ValueError(
                f"{name}={getattr(spec, name)}, wanted a multiple of "
                f"{_GROUPED_ALIGNMENT_ELEMENTS} for {Precision.BF16} in fixed shapes: the grouped "
                "matrix product needs aligned rows"
            )
