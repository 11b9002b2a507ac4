"""The toy gateway as fixtures."""

from tests.unit.infra.serving.gateway.conftest import make_toy, renderer, toy

__all__ = ["make_toy", "renderer", "toy"]
