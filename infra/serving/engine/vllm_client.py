"""vLLM as an engine, behind the same protocol as our own.

Weights are written as a model directory (`write_model_directory`), which vLLM reloads in place. Running requests pause
meanwhile and go on under the new weights, so each token carries its version. EngineConfig.cache_policy says whether their
keys and values of older weights stay or are computed again; a new request shares none of an older version. vLLM's CPU
build cannot reload: it packs matrices at the start and goes on multiplying by the old ones. There a swap waits for the
running requests and starts vLLM again. Unlike our engine, vLLM returns routes of experts on GPUs only, and always those
of the whole context. Draft layers are left out, since vLLM has no model of their form. Needs the extra `vllm`; imported
only when the configuration names it.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil
import torch
from torch import Tensor

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.engine.health import SwapReport
from ostinato.infra.serving.engine.start import EngineStream
from ostinato.infra.serving.published_models import write_model_directory
from ostinato.models.decode.config import CachePolicy, EngineConfig, Precision
from ostinato.models.decode.protocol import GenerateRequest, Generation, Priority, StopReason
from ostinato.models.decode.requests import check_request
from ostinato.models.decode.weights import check_weights
from ostinato.models.spec import ModelSpec

try:
    from vllm import AsyncEngineArgs, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.outputs import CompletionOutput  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"module {missing.name} is missing: install the extra `vllm`", name=missing.name
    ) from missing

_BLOCK_TOKENS = 256  # a slot may leave part of its last block empty
_LEAST_CACHE_BYTES = 256 << 20
_DELIVERY_SECONDS = 0.01  # many turns of the event loop
_RANK = {priority: rank for rank, priority in enumerate(Priority)}  # lower goes first


class VllmEngine:
    """A `ModelClient` over vLLM's asynchronous engine. Serves one event loop."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        version: int,
        config: EngineConfig,
        name: str = "vllm",
    ) -> None:
        check_weights(spec, weights)  # the same checks as our engine's
        self.spec, self.name, self.version = spec, name, version
        self._config = config
        self._dtype = torch.float32 if config.precision is Precision.FP32 else torch.bfloat16
        self._directory = tempfile.TemporaryDirectory(prefix="ostinato-vllm-")
        self._swapping = asyncio.Lock()
        self._is_closed = False
        self._generated_tokens = 0  # of ended requests
        self._read_tokens = 0  # of all requests
        longest = spec.max_sequence_tokens
        self.max_context_tokens = min(config.max_context_tokens or longest, longest)
        self._streams: dict[str, tuple[asyncio.Task[None], _Sampled]] = {}
        self._reloads_in_place = torch.cuda.is_available()
        self._served = self._write(weights, version)  # the model directory
        self._engine = self._start(self._served)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer. A caller that is cancelled cancels the request."""
        check_request(request, self.spec.vocab_size)
        self._check_open()
        return await self._sample(request, _Sampled(), None)

    def stream(self, request: GenerateRequest) -> EngineStream:
        """Samples an answer and yields its tokens as they come."""
        check_request(request, self.spec.vocab_size)
        self._check_open()
        stream = EngineStream(partial(self._cancel, request))
        sampled = _Sampled()
        task = asyncio.create_task(self._feed(request, sampled, stream))
        self._streams[request.request_id] = task, sampled
        return stream

    async def _feed(
        self, request: GenerateRequest, sampled: "_Sampled", stream: EngineStream
    ) -> None:
        try:
            stream.end(await self._sample(request, sampled, stream))
        except Exception as error:  # noqa: BLE001 - the reader of the stream raises it
            stream.fail(error)
        finally:
            self._streams.pop(request.request_id, None)

    def _cancel(self, request: GenerateRequest) -> Generation:
        """Cancels a stream's request. Returns the part of the answer that was sampled."""
        task, sampled = self._streams.pop(request.request_id)
        task.cancel()  # cancels the request in vLLM too
        return self._finish(request, sampled, StopReason.CANCELLED)

    async def _sample(
        self, request: GenerateRequest, sampled: "_Sampled", stream: EngineStream | None
    ) -> Generation:
        left_tokens = self.max_context_tokens - len(request.token_ids)
        if left_tokens <= 0 or request.max_new_tokens == 0:
            reason = StopReason.CONTEXT if left_tokens <= 0 else StopReason.LENGTH
            return self._finish(request, sampled, reason)
        async with self._swapping:  # a new request waits for a swap
            pass
        outputs = self._engine.generate(
            {"prompt_token_ids": list(request.token_ids), "cache_salt": f"version {self.version}"},
            _sampling(request, min(left_tokens, request.max_new_tokens)),
            request.request_id,
            priority=_RANK[request.priority],
        )
        async for output in outputs:
            sampled.output = last = output.outputs[0]
            fresh = len(last.token_ids) - len(sampled.versions)
            sampled.versions += [self.version] * fresh
            self._read_tokens += fresh
            sampled.cut = _stop_sequence_end(last.token_ids, request.stop_sequences)
            if stream is not None:
                stream.put(tuple(last.token_ids[stream.num_tokens : sampled.cut]))
            if sampled.cut is not None:
                await self._engine.abort(request.request_id)
                break
        if sampled.output is None:
            raise EngineError(f"engine {self.name} gave request {request.request_id} no answer")
        return self._finish(request, sampled, _stop_reason(sampled.output, request, sampled.cut))

    async def end_session(self, session_id: str) -> None:
        """Does nothing: vLLM's prefix cache knows no sessions and evicts by itself."""

    async def swap_weights(self, weights: Mapping[str, Tensor], version: int) -> SwapReport:
        """Serves `weights` from here on. Running requests go on under them where vLLM reloads in place, else they end first.
        EngineError, and no change, if the weights are invalid.
        """
        self._check_open()
        started_at = perf_counter()
        try:
            await asyncio.to_thread(check_weights, self.spec, weights)
        except ValueError as error:
            raise EngineError(f"engine {self.name} refuses weights: {error}") from error
        directory = await asyncio.to_thread(self._write, weights, version)
        prepare_seconds = perf_counter() - started_at
        async with self._swapping:
            started_at = perf_counter()
            if self._reloads_in_place:
                await self._reload(directory, version)
            else:
                await self._engine.pause_generation(mode="wait", clear_cache=True)
                self._engine.shutdown()
                self._engine = self._start(directory)
                self.version = version
            earlier, self._served = self._served, directory
        report = SwapReport(version, prepare_seconds, perf_counter() - started_at)
        await asyncio.to_thread(shutil.rmtree, earlier, ignore_errors=True)
        return report

    async def _reload(self, directory: Path, version: int) -> None:
        """Reads new weights in place. Running requests pause meanwhile."""
        is_exact = self._config.cache_policy is CachePolicy.EXACT
        await self._engine.pause_generation(mode="keep", clear_cache=is_exact)
        try:
            place = {"weights_path": str(directory)}
            await self._engine.collective_rpc("reload_weights", kwargs=place)
            await self._read_delivered()
            self.version = version
        finally:  # requests would stay frozen
            await self._engine.resume_generation()

    async def _read_delivered(self) -> None:
        """Waits while tokens of the old weights, which the paused engine has already sent, are read."""
        seen = -1
        while (tokens := self._read_tokens) != seen:
            seen = tokens
            await asyncio.sleep(_DELIVERY_SECONDS)

    def statistics(self) -> dict[str, float]:
        """Tokens generated so far. Other metrics are vLLM's own."""
        return {"generated_tokens": float(self._generated_tokens)}

    def close(self) -> None:
        """Ends vLLM's processes and removes the model directory."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.shutdown()
            self._directory.cleanup()

    def _start(self, directory: Path) -> AsyncLLM:
        arguments = AsyncEngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype=str(self._dtype).split(".")[-1],
            max_model_len=self.max_context_tokens,
            max_num_seqs=self._config.slots,
            tensor_parallel_size=max(1, self._config.gpus_per_replica),
            kv_cache_memory_bytes=None if torch.cuda.is_available() else self._cache_bytes(),
            logprobs_mode="processed_logprobs",
            scheduling_policy="priority",
            enable_prefix_caching=True,
            # needs vLLM's second model runner, which its CPU build lacks
            enable_return_routed_experts=self._reloads_in_place and self.spec.num_moe_layers > 0,
            enforce_eager=True,
            disable_log_stats=True,
        )
        return AsyncLLM.from_engine_args(arguments)

    def _cache_bytes(self) -> int:
        """Bytes of the KV cache of all slots, at most half of the free memory. By default vLLM takes 92 % of a
        CPU machine's memory, and does not start when other programs use some of it.
        """
        width = 2 * self.spec.num_layers * self.spec.num_query_groups * self.spec.head_dim
        tokens = self._config.slots * (self.max_context_tokens + _BLOCK_TOKENS)
        wanted = tokens * width * self._dtype.itemsize
        return min(max(wanted, _LEAST_CACHE_BYTES), psutil.virtual_memory().available // 2)

    def _write(self, weights: Mapping[str, Tensor], version: int) -> Path:
        place = Path(tempfile.mkdtemp(prefix=f"version-{version}-", dir=self._directory.name))
        # only the tokens that a request names stop its answer
        no_stop_tokens = {"bos_token_id": None, "eos_token_id": None}
        write_model_directory(place, self.spec, weights.__getitem__, self._dtype, no_stop_tokens)
        return place

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError(f"engine {self.name} is closed, wanted an open one")

    def _finish(
        self, request: GenerateRequest, sampled: "_Sampled", stop_reason: StopReason
    ) -> Generation:
        output, cut = sampled.output, sampled.cut
        token_ids = () if output is None else tuple(output.token_ids[:cut])
        logprobs = [] if output is None else _logprobs(output)[:cut]
        routes = None if output is None else output.routed_experts
        self._generated_tokens += len(token_ids)
        fed = len(request.token_ids) + len(token_ids) - 1 if token_ids else 0
        shape = (0, self.spec.num_moe_layers, self.spec.experts_per_token)
        if routes is None or not request.return_routes:
            routes = np.zeros(shape, dtype=np.int16)
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs_T=np.array(logprobs, dtype=np.float32),
            weight_versions_T=np.array(sampled.versions[: len(token_ids)], dtype=np.int64),
            routed_experts=routes[:fed].astype(np.int16),
            route_offset=0,
            stop_reason=stop_reason,
            likeliest_T=_likeliest(output, request.top_logprobs)[:cut],
        )


@dataclass(slots=True)
class _Sampled:
    """The sampled part of an answer."""

    output: CompletionOutput | None = None
    versions: list[int] = field(default_factory=list)  # of the weights, per token
    cut: int | None = None  # tokens up to the end of a stop sequence


def _sampling(request: GenerateRequest, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed % 2**63,
        max_tokens=max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # only the request's stop tokens count
        logprobs=request.top_logprobs,  # beside that of the sampled token
        detokenize=False,
    )


def _logprobs(output: CompletionOutput) -> list[float]:
    assert output.logprobs is not None, "log-probabilities were asked for"
    return [
        places[token].logprob
        for token, places in zip(output.token_ids, output.logprobs, strict=True)
    ]


def _likeliest(
    output: CompletionOutput | None, count: int
) -> tuple[tuple[tuple[int, float], ...], ...]:
    if output is None or not output.logprobs or not count:
        return ()
    by_token = (
        sorted(
            ((token, place.logprob) for token, place in places.items()), key=lambda pair: -pair[1]
        )
        for places in output.logprobs
    )
    return tuple(
        tuple(pair for pair in pairs[:count] if pair[1] > float("-inf")) for pairs in by_token
    )


def _stop_sequence_end(token_ids: list[int], sequences: tuple[tuple[int, ...], ...]) -> int | None:
    """Tokens up to the end of the first stop sequence. None when there is none."""
    for end in range(1, len(token_ids) + 1 if sequences else 0):
        for run in sequences:
            if end >= len(run) and tuple(token_ids[end - len(run) : end]) == run:
                return end
    return None


def _stop_reason(output: CompletionOutput, request: GenerateRequest, cut: int | None) -> StopReason:
    if cut is not None and output.token_ids[cut - 1] not in request.stop_token_ids:
        return StopReason.STOP_SEQUENCE
    if output.token_ids and output.token_ids[-1] in request.stop_token_ids:
        return StopReason.STOP_TOKEN
    is_whole = len(output.token_ids) >= request.max_new_tokens
    return StopReason.LENGTH if is_whole else StopReason.CONTEXT
