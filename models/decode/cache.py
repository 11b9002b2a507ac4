"""KV cache of the decode engine: one row of fixed length per slot, and each position's experts.

Shapes: L layers, S slots, G key/value heads, d head width, C positions of a slot, K experts per
token. Keys are stored with positions last ([d, C]), so that the score product of a decode step
reads memory in order.
"""

import numpy as np

from ostinato.models.decode.compiled.packed import aligned_floats
from ostinato.models.decode.weights import expert_sizes
from ostinato.models.spec import ModelSpec


class SlotCache:
    """Keys, values and routes of all slots."""

    def __init__(self, spec: ModelSpec, slots: int, positions: int) -> None:
        rows = (spec.num_layers, slots, spec.num_query_groups)
        floats = spec.num_layers * slots * spec.key_value_size * positions
        # Zeros, not empty: a masked position has weight 0, and 0 * NaN would still be NaN.
        self.keys_LSGdC = aligned_floats(floats).reshape(*rows, spec.head_dim, positions)
        self.values_LSGCd = aligned_floats(floats).reshape(*rows, positions, spec.head_dim)
        self._routed = spec.num_dense_layers, spec.experts_per_token
        _, per_token, _ = expert_sizes(spec)
        self.routes_SCLK = np.zeros((slots, positions, spec.num_layers, per_token), dtype=np.int16)

    def copy_routes(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Routes of some positions, without those that the compiled trunk writes for dense layers."""
        layers, per_token = self._routed
        return self.routes_SCLK[slot, start:stop, layers:, :per_token].copy()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the first positions of one slot to another."""
        self.routes_SCLK[target, :length] = self.routes_SCLK[source, :length]
        self.keys_LSGdC[:, target, :, :, :length] = self.keys_LSGdC[:, source, :, :, :length]
        self.values_LSGCd[:, target, :, :length] = self.values_LSGCd[:, source, :, :length]
