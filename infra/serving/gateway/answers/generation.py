"""Generation of one answer for a client: token by token, or in slices over one session.

An engine in this process streams token by token. A model that cannot stream is asked for slices
over one session, so each slice only adds its tokens. Both ways give the same answer, since the
sampling noise depends on seed and position only. `AnswerText` looks for stop strings in the text
as tokens arrive, since one string has many tokenisations. The answer ends with the token that
completes a stop string, and its text ends before the string.
"""

import asyncio
import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.gateway.answers.messages import ChatHistory
from ostinato.infra.serving.gateway.arms import Arm
from ostinato.infra.serving.gateway.config import Caller
from ostinato.infra.serving.gateway.schemas import ChatRequest, Usage
from ostinato.models.decode.protocol import (
    GenerateRequest,
    Generation,
    Priority,
    StopReason,
    StreamingClient,
)
from ostinato.models.rendering import Renderer


class AnswerText:
    """The growing text of an answer. Invalid UTF-8 becomes U+FFFD, as in `Renderer.decode`."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError(f"stops are {list(stops)!r}, wanted strings of 1 character or more")
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def feed(self, token_bytes: bytes) -> bool:
        """Adds one token. True when a stop string is now complete. Later text is dropped."""
        return self._add(self._decoder.decode(token_bytes))

    def close(self) -> bool:
        """Ends the text: half a character becomes U+FFFD. True when that completes a stop string."""
        return self._add(self._decoder.decode(b"", final=True))

    @property
    def stable_text(self) -> str:
        """The part of the text that later tokens cannot change: no end that may begin a stop string."""
        if self.is_stopped:
            return self.text
        return self.text[: len(self.text) - self._undecided_characters()]

    def _add(self, characters: str) -> bool:
        if self.is_stopped or not characters:
            return self.is_stopped
        seen = len(self.text)
        self.text += characters
        places = []
        for stop in self._stops:
            start = self.text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                places.append((start + len(stop), start, stop))
        if places:
            _, start, self.stop = min(places)
            self.text = self.text[:start]
        return self.is_stopped

    def _undecided_characters(self) -> int:
        """Length of the longest end of the text that may begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


@asynccontextmanager
async def grant_all(most_tokens: int) -> AsyncIterator[int]:
    """Grants the tokens that an answer asks for."""
    yield most_tokens


@dataclass(slots=True, weakref_slot=True)
class Answering:
    """One answer in progress."""

    request: ChatRequest
    tenant: Caller
    owner: tuple[str, str]  # tenant, session id of the client
    interaction_id: str
    session_id: str  # the engine's, which continues the tokens of one conversation
    user_session_id: str  # several conversations of one client, if it names its session
    arm: Arm
    builder: SegmentBuilder
    prompt_tokens: int
    budget_tokens: int
    seed: int
    tools: tuple[str, ...]
    started: float
    text: AnswerText
    is_thought_open: bool  # by the prompt
    earlier: ChatHistory | None = None  # the chat that it continues
    priority: Priority = Priority.USER
    # grants at most so many tokens, where answers share a limit; 0: none is left
    reserve: Callable[[int], AbstractAsyncContextManager[int]] = grant_all
    answer_ids: list[int] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    stop_reason: StopReason | None = None
    is_recorded: bool = False
    is_delivered: bool = False  # whether the client of an unstreamed answer stayed to its end
    is_client_gone: Callable[[], Awaitable[bool]] | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        done = len(self.answer_ids)
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=done,
            total_tokens=self.prompt_tokens + done,
        )


class AnswerGenerator:
    """Samples answers, one at a time in each session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def generate(
        self, answering: Answering, ahead_tokens: int | None
    ) -> AsyncGenerator[None, None]:
        """Yields after new tokens, at least every `ahead_tokens`. None: only at the end."""
        model = answering.arm.model
        async with self._locks.setdefault(answering.session_id, asyncio.Lock()):
            is_alone = answering.reserve is grant_all
            if ahead_tokens is not None and is_alone and isinstance(model, StreamingClient):
                pieces = self._by_token(answering, model)
            else:
                pieces = self._in_slices(answering, ahead_tokens or answering.budget_tokens)
            try:
                async with aclosing(pieces):
                    async for _ in pieces:
                        yield
            finally:
                if answering.text.close():
                    answering.stop_reason = StopReason.STOP_SEQUENCE

    async def _in_slices(
        self, answering: Answering, slice_tokens: int
    ) -> AsyncGenerator[None, None]:
        """Slices until a stop or the budget. The engine continues its own session."""
        while answering.stop_reason is None:
            left = answering.budget_tokens - len(answering.answer_ids)
            async with answering.reserve(min(slice_tokens, left)) as granted_tokens:
                if not granted_tokens:
                    answering.stop_reason = StopReason.LENGTH
                    return
                request = self._engine_request(answering, granted_tokens)
                generation = await answering.arm.model.generate(request)
                if generation.stop_reason is StopReason.CANCELLED:
                    raise EngineError(f"generation {generation.request_id} was cancelled")
                self._record(answering, generation, 0)
            is_spent = len(answering.answer_ids) >= answering.budget_tokens
            if answering.text.is_stopped:
                return
            if generation.stop_reason is not StopReason.LENGTH or is_spent:
                answering.stop_reason = generation.stop_reason
            yield

    async def _by_token(
        self, answering: Answering, model: StreamingClient
    ) -> AsyncGenerator[None, None]:
        """Tokens as the engine samples them. Those after a stop string are dropped."""
        tokens = model.stream(self._engine_request(answering, answering.budget_tokens))
        try:
            async for sampled in tokens:
                self._read(answering, sampled)
                yield
                if answering.text.is_stopped:
                    break
        finally:
            generation = tokens.close()
            self._record(answering, generation, len(answering.answer_ids))
        answering.stop_reason = generation.stop_reason

    def _record(self, answering: Answering, generation: Generation, num_read: int) -> None:
        """Records a generation up to the end of a stop string. `num_read` of its tokens were read before."""
        before = len(answering.answer_ids) - num_read
        self._read(answering, generation.token_ids[num_read:])
        kept_tokens = len(answering.answer_ids) - before
        kept = generation.first(kept_tokens)
        answering.builder.append_generation(kept)
        answering.likeliest.extend(kept.likeliest_T)

    def _read(self, answering: Answering, token_ids: Sequence[int]) -> None:
        """Adds tokens to the answer, up to and including the one that completes a stop string."""
        for token_id in token_ids:
            if answering.text.is_stopped:
                return
            answering.answer_ids.append(token_id)
            if token_id not in self._renderer.stop_token_ids:  # the engine's stop tokens end it
                answering.text.feed(self._renderer.token_bytes(token_id))

    def _engine_request(self, answering: Answering, max_new_tokens: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"{answering.interaction_id}/{len(answering.answer_ids)}",
            session_id=answering.session_id,
            token_ids=tuple(answering.builder.token_ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            temperature=answering.request.temperature,
            top_p=answering.request.top_p,
            top_logprobs=answering.request.top_logprobs or 0,
            seed=answering.seed,
            priority=answering.priority,
        )
