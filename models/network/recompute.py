"""Activation recomputation: a layer keeps its input for backward and runs forward again there (arXiv 1604.06174).

Megatron's own checkpoint function reads CUDA's random state. Nothing is drawn here, so torch's
serves on every device. The second forward pass routes tokens to the experts that the first one
chose, and counts none.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ostinato.models.network.routing import ReplayRouter


class RecomputableLayer(TransformerLayer):
    """Megatron's layer. With `is_recomputed` it keeps nothing but its input between forward and backward."""

    is_recomputed = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        if not (self.is_recomputed and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(
            super().forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self._forward_and_again,
            # an early stop could skip a layer's last collectives on some ranks only
            early_stop=False,
            **kwargs,
        )

    def _forward_and_again(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        router = getattr(self.mlp, "router", None)
        if not isinstance(router, ReplayRouter):
            return nullcontext(), nullcontext()
        chosen: list[Tensor] = []
        return _keeping(router, chosen), _repeating(router, chosen)


@contextmanager
def _keeping(router: ReplayRouter, chosen: list[Tensor]) -> Iterator[None]:
    """Within it, the experts that a router chooses are appended to `chosen`."""
    router.chosen = chosen
    try:
        yield
    finally:
        router.chosen = None


@contextmanager
def _repeating(router: ReplayRouter, chosen: list[Tensor]) -> Iterator[None]:
    """Within it, a router chooses what it chose before."""
    [router.repeated_NK] = chosen
    try:
        yield
    finally:
        router.repeated_NK = None
