"""One decode engine in one thread, for async callers in the same process.

Owns `LocalEngine`: the thread, the inbox of requests and commands, delivery of answers to any event loop, and weight swaps
that are prepared off the decode thread and applied between two steps. Enters: requests, canonical weights. Leaves:
generations. It knows neither Ray nor the weight chain.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter

import torch
from torch import Tensor

from infra.errors import EngineError
from models.decode.engine import DecodeEngine, EngineConfig
from models.decode.protocol import GenerateRequest, Generation
from models.decode.weights import DecodeWeights, prepare_weights
from models.spec import ModelSpec

_logger = logging.getLogger(__name__)

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Generation]"]


@dataclass(frozen=True, slots=True)
class SwapReport:
    """One weight swap."""

    version: int
    prepare_seconds: float  # checking and fusing, beside the running decode thread
    pause_seconds: float  # the decode thread's own time, between two steps


class LocalEngine:
    """A `ModelClient` over an engine in this process."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        version: int,
        config: EngineConfig,
        name: str = "engine",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.spec = spec
        self.name = name
        self._engine = DecodeEngine(spec, prepare_weights(spec, weights, version), config, clock)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiters: dict[str, _Waiter] = {}  # touched by the decode thread only
        self._failure: BaseException | None = None
        self._has_ended = False
        self._inbox_lock = (
            threading.Lock()
        )  # no command may slip in after the thread emptied its inbox
        self._swap_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"decode-{name}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that make the next token."""
        return self._engine.version

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus answer."""
        return self._engine.max_context_tokens

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer. A caller that is cancelled cancels the request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        self._tell(lambda: self._submit(request, (loop, future)))
        try:
            return await future
        except asyncio.CancelledError:
            self._tell(lambda: self._cancel(request.request_id))
            raise

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Generation]:
        """Samples an answer to each request; one failure fails the call."""
        return await asyncio.gather(*(self.generate(request) for request in requests))

    async def end_session(self, session_id: str) -> None:
        """Lets the cache of a finished conversation go."""
        self._tell(lambda: self._engine.end_session(session_id))

    async def swap_weights(self, weights: Mapping[str, Tensor], version: int) -> SwapReport:
        """Serves `weights` from the next step on; returns when they are in place."""
        return await asyncio.to_thread(self.swap_weights_blocking, weights, version)

    def swap_weights_blocking(self, weights: Mapping[str, Tensor], version: int) -> SwapReport:
        """The same for callers without an event loop. EngineError when the weights are not sound; nothing changes then."""
        with self._swap_lock:
            started_at = perf_counter()
            try:
                prepared = prepare_weights(self.spec, weights, version)
            except ValueError as error:
                raise EngineError(f"engine {self.name} refuses weights: {error}") from error
            prepare_seconds = perf_counter() - started_at
            is_done = threading.Event()
            pauses: list[float] = []
            self._tell(lambda: self._swap(prepared, pauses, is_done))
            is_done.wait()
            if not pauses:
                raise EngineError(
                    f"engine {self.name} ended before weights version {version} were applied"
                )
            return SwapReport(version, prepare_seconds, pauses[0])

    def statistics(self) -> dict[str, float]:
        """Running totals of the engine and what it holds now; read without stopping it."""
        engine = self._engine
        return engine.statistics.snapshot() | {
            "version": float(engine.version),
            "load_tokens": float(engine.load_tokens),
            "running_requests": float(engine.num_running),
            "waiting_requests": float(engine.num_waiting),
        }

    def draft_acceptance(self) -> list[float]:
        """Share of draft tokens accepted a depth since the last swap of the gate; empty without speculation."""
        return self._engine.draft_acceptance()

    def close(self) -> None:
        """Ends the thread; requests still held fail with EngineError."""
        with self._inbox_lock:
            self._inbox.put(None)
        self._thread.join()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._inbox_lock:
            if self._has_ended:
                reason = "is closed" if self._failure is None else f"failed: {self._failure!r}"
                raise EngineError(f"engine {self.name} {reason}, wanted a running one")
            self._inbox.put(command)

    # --- the decode thread

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while self._take_commands():
                self._deliver(self._engine.step())
        except BaseException as error:
            self._failure = error
            _logger.exception("engine=%s decode thread failed", self.name)
        finally:
            self._end()

    def _take_commands(self) -> bool:
        """Runs every command at hand, waiting for one when there is nothing to decode; False to end."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except Empty:
                return True
            if command is None:
                return False
            command()

    def _submit(self, request: GenerateRequest, waiter: _Waiter) -> None:
        loop, future = waiter
        try:
            if request.request_id in self._waiters:
                raise ValueError(
                    f"request_id {request.request_id!r} is already held, wanted a new one"
                )
            self._engine.submit(request)
        except ValueError as error:
            loop.call_soon_threadsafe(_fail, future, error)
            return
        self._waiters[request.request_id] = waiter

    def _cancel(self, request_id: str) -> None:
        if self._waiters.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def _swap(self, prepared: DecodeWeights, pauses: list[float], is_done: threading.Event) -> None:
        started_at = perf_counter()
        self._engine.swap_weights(prepared)
        pauses.append(perf_counter() - started_at)
        is_done.set()

    def _deliver(self, finished: list[Generation]) -> None:
        if not finished:
            return
        batches: dict[
            asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Generation], Generation]]
        ] = defaultdict(list)
        for generation in finished:
            loop, future = self._waiters.pop(generation.request_id)
            batches[loop].append((future, generation))
        for loop, answers in batches.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, answers)

    def _end(self) -> None:
        """Refuses new commands and fails every request held, those still in the inbox too."""
        with self._inbox_lock:
            self._has_ended = True
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                command()
        reason = "was closed" if self._failure is None else f"failed: {self._failure!r}"
        error = EngineError(f"engine {self.name} {reason} before the request ended")
        for loop, future in self._waiters.values():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_fail, future, error)
        self._waiters.clear()


def _resolve(answers: list[tuple["asyncio.Future[Generation]", Generation]]) -> None:
    for future, generation in answers:
        if not future.done():
            future.set_result(generation)


def _fail(future: "asyncio.Future[Generation]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
