"""A model that says what the test tells it to, in tokens, with log-probabilities and routes that
can be checked."""

from collections.abc import Iterable

import numpy as np

from ostinato.infra.platform.errors import EngineError
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.rendering import Renderer

NUM_LAYERS = 2
EXPERTS_PER_TOKEN = 2


class ScriptedModel:
    """Answers in order. A position's routes are its index in the context: stitching shows."""

    def __init__(
        self, renderer: Renderer, answers: Iterable[str | Exception], weight_version: int = 0
    ) -> None:
        self.renderer = renderer
        self.answers = list(answers)
        self.weight_version = weight_version
        self.requests: list[GenerateRequest] = []
        self.ended_sessions: list[str] = []
        self._processed: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        if len(self.requests) > len(self.answers):
            raise EngineError(f"script has {len(self.answers)} answers, one more was wanted")
        answer = self.answers[len(self.requests) - 1]
        if isinstance(answer, Exception):
            raise answer
        ids = self.renderer.encode_answer(answer)
        stop_reason = StopReason.STOP_TOKEN
        if len(ids) > request.max_new_tokens:
            ids, stop_reason = ids[: request.max_new_tokens], StopReason.LENGTH
        first = self._processed.get(request.session_id, 0)
        last = len(request.token_ids) + len(ids) - 1
        self._processed[request.session_id] = last
        positions = np.arange(first, last, dtype=np.int16)
        version = self.weight_version + len(self.requests) - 1
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs_T=-np.arange(1, len(ids) + 1, dtype=np.float32),
            weight_versions_T=np.full(len(ids), version, dtype=np.int64),
            routed_experts=np.broadcast_to(
                positions[:, None, None], (len(positions), NUM_LAYERS, EXPERTS_PER_TOKEN)
            ),
            route_offset=first,
            stop_reason=stop_reason,
        )

    async def end_session(self, session_id: str) -> None:
        self.ended_sessions.append(session_id)
