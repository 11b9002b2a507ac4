"""Greedy answers of an engine: continuations of text, or chat answers if it has a chat template."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.models.decode.protocol import GenerateRequest, StreamingClient
from ostinato.models.rendering.chat_template import TemplateRenderer
from ostinato.models.rendering.renderer import Renderer

_BLOCK = re.compile(r"```[a-z]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


class Prompt(NamedTuple):
    """A task in both forms."""

    name: str
    text: str  # to be continued
    ends: tuple[str, ...]  # texts that end the continuation
    question: str  # asks for the same in one block of code
    answer_tokens: int


class Completer:
    """Samples answers from an engine and counts their tokens and seconds."""

    def __init__(
        self, engine: StreamingClient, renderer: Renderer, concurrent: int, max_context_tokens: int
    ) -> None:
        self._engine, self._renderer = engine, renderer
        self._max_context_tokens = max_context_tokens
        self._slots = asyncio.Semaphore(concurrent)
        self.is_chat = isinstance(renderer, TemplateRenderer) and not renderer.is_chosen
        self.sampled_tokens = 0
        self.seconds = 0.0

    async def warm_up(self) -> None:
        """Makes the engine compile before the first timed request."""
        await self._sample("warm-up", tuple(self._renderer.encode_content("def")), 2, ())

    async def complete_all(
        self, prompts: Sequence[Prompt], on_done: Callable[[], None]
    ) -> list[str | None]:
        """Continuations without the text that ended them, or the code of answers. None: the prompt
        is too long.
        """
        started_at = time.perf_counter()
        answers = await asyncio.gather(*(self._complete(item, on_done) for item in prompts))
        self.seconds += time.perf_counter() - started_at
        return answers

    async def _complete(self, prompt: Prompt, on_done: Callable[[], None]) -> str | None:
        ends = () if self.is_chat else prompt.ends
        token_ids = tuple(
            self._renderer.start(prompt.question)
            if self.is_chat
            else self._renderer.encode_content(prompt.text)
        )
        text: str | None = None
        if len(token_ids) + prompt.answer_tokens <= self._max_context_tokens:
            async with self._slots:
                sampled = await self._sample(prompt.name, token_ids, prompt.answer_tokens, ends)
            self.sampled_tokens += len(sampled)
            if sampled and sampled[-1] in self._renderer.stop_token_ids:
                sampled.pop()
            text = self._renderer.decode(sampled)
            text = text[: _end_of(text, ends)]
            block = _BLOCK.search(text) if self.is_chat else None
            text = block[1] if block else text
        on_done()
        return text

    async def _sample(
        self, name: str, token_ids: tuple[int, ...], most: int, ends: tuple[str, ...]
    ) -> list[int]:
        """Sampled tokens up to and including a stop token or one of the texts `ends`."""
        request = GenerateRequest(
            request_id=name,
            session_id=name,
            token_ids=token_ids,
            max_new_tokens=most,
            stop_token_ids=self._renderer.stop_token_ids,
            temperature=0.0,
            return_routes=False,
        )
        stream = self._engine.stream(request)
        sampled: list[int] = []
        try:
            async for tokens in stream:
                sampled += tokens
                if _end_of(self._renderer.decode(sampled), ends) is not None:
                    break
        finally:
            stream.close()
            await self._engine.end_session(name)
        return sampled


def _end_of(text: str, ends: Sequence[str]) -> int | None:
    """Index of the earliest of `ends` in the text. None: it contains none."""
    found = [index for index in (text.find(end) for end in ends) if index >= 0]
    return min(found, default=None)
