"""A model whose answer is a function of the conversation's text; it can be asked in slices and by
many at once.
"""

from collections.abc import Awaitable, Callable

import numpy as np

from ostinato.infra.platform.errors import EngineError
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.rendering import Renderer


class AnsweringModel:
    """`answer(conversation)` sees all text up to the answer's header. Routes are all expert 0."""

    def __init__(
        self, renderer: Renderer, answer: Callable[[str], str], weight_version: int = 0
    ) -> None:
        self.renderer, self.answer, self.weight_version = renderer, answer, weight_version
        self.requests: list[GenerateRequest] = []
        self.failure: EngineError | None = None
        self.wait: Callable[[], Awaitable[object]] | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        if self.wait is not None:
            await self.wait()
        context = list(request.token_ids)
        header = len(context) - 1 - context[::-1].index(self.renderer.assistant_id)
        done = len(context) - header - 1
        whole = self.renderer.encode_answer(self.answer(self.renderer.decode(context[:header])))
        ids = whole[done : done + request.max_new_tokens]
        finished = done + len(ids) == len(whole)
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs_T=np.full(len(ids), -0.5, dtype=np.float32),
            weight_versions_T=np.full(len(ids), self.weight_version, dtype=np.int64),
            routed_experts=np.zeros((len(context) + len(ids) - 1, 1, 1), dtype=np.int16),
            route_offset=0,
            stop_reason=StopReason.STOP_TOKEN if finished else StopReason.LENGTH,
        )

    async def end_session(self, session_id: str) -> None:
        return None
