"""Decode engine: the built-in one, with the seconds of the slowest answer in its statistics."""

from time import perf_counter
from typing import Any

from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.models.decode.protocol import GenerateRequest, Generation


class TimedEngine(LocalEngine):
    """The built-in engine with a clock around each answer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slowest_seconds = 0.0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples an answer."""
        began = perf_counter()
        try:
            return await super().generate(request)
        finally:
            self._slowest_seconds = max(self._slowest_seconds, perf_counter() - began)

    def statistics(self) -> dict[str, float]:
        """The engine's statistics and the seconds of the slowest answer."""
        return super().statistics() | {"answer_seconds_max": self._slowest_seconds}
