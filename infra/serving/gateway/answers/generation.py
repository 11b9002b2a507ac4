"""Generation of one answer for a client: token by token, or in slices over one session.

An engine in this process streams token by token; from a model that cannot, a streamed answer is
asked for in slices over one session, so each slice only adds its tokens. Either way noise depends
on seed and position: the answer is the same. Stop strings are looked for in the text as tokens
arrive (`AnswerText`), since one string can come in many tokenisations: the answer ends with the
token that completes one, and shows nothing of it.
"""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.platform.errors import EngineError
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
    """Text that grows. A character that is not UTF-8 is U+FFFD, as in `Renderer.decode`."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError(f"stops are {list(stops)!r}, wanted strings of 1 character or more")
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self.stop: str | None = None  # the one that ended it

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def feed(self, token_bytes: bytes) -> bool:
        """Adds one token. True when a stop is now complete. Text after a stop is not taken."""
        return self._add(self._decoder.decode(token_bytes))

    def close(self) -> bool:
        """No token follows: half a character becomes U+FFFD. True when that completed a stop."""
        return self._add(self._decoder.decode(b"", final=True))

    @property
    def stable_text(self) -> str:
        """The part of the text that stays whatever follows: no end that may begin a stop."""
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
        """Length of the longest end of the text that is the beginning of a stop."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(slots=True)
class Answering:
    """One answer under way."""

    request: ChatRequest
    tenant: Caller
    owner: tuple[str, str]  # tenant, session id of the client
    interaction_id: str
    session_id: str
    arm: Arm
    builder: SegmentBuilder
    prompt_tokens: int
    budget_tokens: int
    seed: int
    tools: tuple[str, ...]
    started: float
    text: AnswerText
    is_thought_open: bool  # by the prompt
    answer_ids: list[int] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    stop_reason: StopReason | None = None
    is_recorded: bool = False

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
    """The model's side of answers. One generation at a time in each session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def generate(
        self, answering: Answering, ahead_tokens: int | None
    ) -> AsyncGenerator[None, None]:
        """Yields whenever there is more text, at least every `ahead_tokens`. None: at the end."""
        model = answering.arm.model
        async with self._locks.setdefault(answering.session_id, asyncio.Lock()):
            if ahead_tokens is not None and isinstance(model, StreamingClient):
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
            request = self._engine_request(answering, min(slice_tokens, left))
            generation = await answering.arm.model.generate(request)
            if generation.stop_reason is StopReason.CANCELLED:
                raise EngineError(f"generation {generation.request_id} was cancelled")
            self._take(answering, generation, 0)
            is_spent = len(answering.answer_ids) >= answering.budget_tokens
            if answering.text.is_stopped:
                return
            if generation.stop_reason is not StopReason.LENGTH or is_spent:
                answering.stop_reason = generation.stop_reason
            yield

    async def _by_token(
        self, answering: Answering, model: StreamingClient
    ) -> AsyncGenerator[None, None]:
        """Tokens as the engine samples them. All are kept but those after a stop string."""
        tokens = model.stream(self._engine_request(answering, answering.budget_tokens))
        try:
            async for sampled in tokens:
                self._read(answering, sampled)
                yield
                if answering.text.is_stopped:
                    break
        finally:
            generation = tokens.close()
            self._take(answering, generation, len(answering.answer_ids))
        answering.stop_reason = generation.stop_reason

    def _take(self, answering: Answering, generation: Generation, num_read: int) -> None:
        """Records a generation with `num_read` tokens read, up to the end of a stop string."""
        before = len(answering.answer_ids) - num_read
        self._read(answering, generation.token_ids[num_read:])
        kept_tokens = len(answering.answer_ids) - before
        kept = generation.first(kept_tokens)
        answering.builder.append_generation(kept)
        answering.likeliest.extend(kept.likeliest_T)

    def _read(self, answering: Answering, token_ids: Sequence[int]) -> None:
        """Adds tokens to the answer, up to and with the one that completes a stop string."""
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
            priority=Priority.USER,
        )
