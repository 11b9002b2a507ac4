"""The engines that every contract of a model client runs against.

An engine joins by an entry in ENGINES. The model has a shape that all of them can run, and weights
that bfloat16 would not change, so that each may store them as it likes.
"""

from collections.abc import Callable

import pytest
from torch import Tensor

from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.infra.serving.engine.start import Engine, start_engine
from ostinato.models.decode.engine import EngineConfig
from tests.fakes.small_spec import make_spec
from tests.fakes.tiny_model import random_weights

SPEC = make_spec(96, 64, heads=(4, 2, 32), experts=(4, 2, 32))
VERSION = 3


def gives_routes(engine: Engine) -> bool:
    """vLLM's CPU build has no runner that records the experts."""
    return isinstance(engine, LocalEngine)


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    """Weights of SPEC."""
    return {name: t.bfloat16().float() for name, t in random_weights(SPEC, seed).items()}


def _local() -> LocalEngine:
    return LocalEngine(SPEC, make_weights(), VERSION, EngineConfig(slots=8))


def _vllm() -> Engine:
    config = EngineConfig(slots=8, engine="vllm")
    return start_engine(SPEC, make_weights(), VERSION, config, "vllm")


ENGINES: dict[str, Callable[[], Engine]] = {
    "local": _local,
    "vllm": _vllm,
}
MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "local": (pytest.mark.timeout(300),),  # the first run on a machine compiles
    "vllm": (pytest.mark.vllm, pytest.mark.timeout(600)),
}
