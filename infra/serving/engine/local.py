"""One decode engine inside the caller's event loop.

`LocalEngine`: the task that steps the engine while it has work, delivery of answers, and weight
swaps that are prepared in a thread and applied between two steps.

Steps run in the loop itself, not in a thread: a thread would give up the interpreter lock at each
of the several hundred tensor operations per step and wait up to 5 ms for it whenever the loop is busy
(measured: 14 times slower). So the loop is blocked for one step (a few milliseconds) at a time; a
caller that needs it free puts the engine in a process of its own (`EngineReplica`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.engine.health import SwapReport
from ostinato.infra.serving.engine.start import EngineStream
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.decode.weights import DecodeWeights, prepare_weights
from ostinato.models.spec import ModelSpec

_logger = logging.getLogger(__name__)

# turns of the loop between two steps, so that a caller several hops away from its next request does
# not wait for one step per hop
_LOOP_TURNS_PER_STEP = 3


class LocalEngine:
    """A `ModelClient` over an engine in this process. Serves one event loop at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        version: int,
        config: EngineConfig,
        name: str = "engine",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self._config = config
        self.name = name
        self._clock = clock
        self._engine = DecodeEngine(spec, self._prepare(weights, version), config, clock)
        self._waiters: dict[str, asyncio.Future[Generation]] = {}
        self._streams: dict[str, EngineStream] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._end_reason = ""

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._engine.version

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._engine.max_context_tokens

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer. A caller that is cancelled cancels the request."""
        self._submit(request)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiters[request.request_id] = future
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiters.pop(request.request_id, None) is not None:
                self._engine.cancel(request.request_id)
            raise

    def stream(self, request: GenerateRequest) -> EngineStream:
        """Samples an answer and yields its tokens as they come. The caller must close the stream."""
        self._submit(request)
        stream = EngineStream(partial(self._cancel_stream, request.request_id))
        self._streams[request.request_id] = stream
        return stream

    async def end_session(self, session_id: str) -> None:
        """Frees the KV cache of a finished conversation."""
        self._engine.end_session(session_id)

    async def swap_weights(self, weights: Mapping[str, Tensor], version: int) -> SwapReport:
        """Serves `weights` from the next step on. EngineError, and no change, if they are invalid."""
        self._check_open()
        started_at = self._clock()
        try:
            prepared = await asyncio.to_thread(self._prepare, weights, version)
        except ValueError as error:
            raise EngineError(f"engine {self.name} refuses weights: {error}") from error
        prepare_seconds = self._clock() - started_at
        self._check_open()
        started_at = self._clock()
        self._engine.swap_weights(prepared)
        return SwapReport(version, prepare_seconds, self._clock() - started_at)

    def statistics(self) -> dict[str, float]:
        """Running totals of the engine and its present load."""
        engine = self._engine
        return engine.statistics.snapshot() | engine.load() | {"version": float(engine.version)}

    def close(self) -> None:
        """Refuses new requests. Open requests fail with EngineError."""
        self._end("is closed")

    def _prepare(self, weights: Mapping[str, Tensor], version: int) -> DecodeWeights:
        return prepare_weights(self.spec, weights, version, self._config.precision)

    def _submit(self, request: GenerateRequest) -> None:
        self._check_open()
        if request.request_id in self._waiters or request.request_id in self._streams:
            raise ValueError(f"request_id {request.request_id!r} is already held, wanted a new one")
        self._engine.submit(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())

    def _cancel_stream(self, request_id: str) -> Generation:
        del self._streams[request_id]
        generation = self._engine.cancel(request_id)
        assert generation is not None, "an open stream's request is held by the engine"
        return generation

    def _deliver(self, generation: Generation) -> None:
        stream = self._streams.pop(generation.request_id, None)
        if stream is not None:
            stream.end(generation)
            return
        future = self._waiters.pop(generation.request_id)
        if not future.done():
            future.set_result(generation)

    async def _step_while_busy(self) -> None:
        try:
            while self._engine.has_work and not self._end_reason:
                for generation in self._engine.step():
                    self._deliver(generation)
                for request_id, stream in self._streams.items():
                    stream.put(self._engine.sampled_tokens(request_id, stream.num_tokens))
                for _ in range(_LOOP_TURNS_PER_STEP):
                    await asyncio.sleep(0)
        except Exception as error:
            _logger.exception("engine=%s failed in a step", self.name)
            self._end(f"failed: {type(error).__name__}: {error}")

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        waiters, self._waiters = self._waiters, {}
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.fail(EngineError(f"engine {self.name} {reason} before {request_id} ended"))
        for request_id, future in waiters.items():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(
                    EngineError(f"engine {self.name} {reason} before request {request_id} ended")
                )

    def _check_open(self) -> None:
        if self._end_reason:
            raise EngineError(f"engine {self.name} {self._end_reason}, wanted an open one")
