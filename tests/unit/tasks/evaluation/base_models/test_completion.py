"""What a completion leaves in the engine."""

import asyncio

import pytest

from ostinato.infra.platform.errors import EngineError
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.evaluation.base_models.completion import Completer
from tests.fakes.scripted_model import ScriptedModel


class LostStream:
    """A generation that fails after its first tokens."""

    is_closed = False

    async def __aiter__(self):
        yield (1,)
        raise EngineError("lost")

    def close(self) -> None:
        self.is_closed = True


class LosingModel(ScriptedModel):
    """A model all of whose streams fail."""

    def stream(self, _: GenerateRequest) -> LostStream:
        self.opened = LostStream()
        return self.opened


def test_a_completion_that_fails_leaves_neither_stream_nor_session() -> None:
    renderer = Renderer(train_tokenizer(["x = 1\n"], vocab_size=400))
    model = LosingModel(renderer, [])
    completer = Completer(model, renderer, 1, 64)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="lost"):
        asyncio.run(completer.warm_up())
    assert model.opened.is_closed
    assert model.ended_sessions == ["warm-up"]
