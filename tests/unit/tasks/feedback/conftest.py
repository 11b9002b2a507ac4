"""The toy gateway as fixtures."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.models.rendering import Renderer
from tests.fakes.toy_gateway import Toy, make_renderer, make_toy_gateway


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return make_renderer()


@pytest.fixture
def make_toy(tmp_path: Path, renderer: Renderer) -> Callable[..., Toy]:
    return lambda *arguments, **changes: make_toy_gateway(tmp_path, renderer, *arguments, **changes)


@pytest.fixture
def toy(make_toy: Callable[..., Toy]) -> Toy:
    return make_toy()
