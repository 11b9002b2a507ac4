"""Key/value memory of the decode engine, one row of fixed length a slot.

`SlotCache`: keys, values and routed experts of every position of every slot, and the index
arithmetic that writes many positions of many slots in one operation. It does not know requests or
sessions.

Shapes: L layers, S slots, G key/value heads, d head width, C positions of a slot, K experts a
token, N rows of a pass. Keys are stored with positions last ([d, C]): the score product of a decode
step then streams memory.
"""

import numpy as np
import torch
from torch import Tensor

from ostinato.models.spec import ModelSpec


class RouteTable:
    """The experts chosen at each position of each slot, on the host."""

    def __init__(self, spec: ModelSpec, slots: int, positions: int) -> None:
        self.routes_SCLK = torch.zeros(
            slots, positions, spec.num_layers, spec.experts_per_token, dtype=torch.int16
        )
        self.positions = positions
        self._flat_routes = self.routes_SCLK.view(slots * positions, -1)

    @property
    def recorded_SCLK(self) -> np.ndarray:
        """The same memory as numpy sees it. Made when asked for, since a fake tensor has none."""
        return self.routes_SCLK.numpy()

    def write_routes(
        self, slots_N: np.ndarray, positions_N: np.ndarray, routes_NLK: Tensor
    ) -> None:
        """Stores the experts chosen for N rows."""
        rows = torch.from_numpy(slots_N * self.positions + positions_N)
        self._flat_routes.index_copy_(0, rows, routes_NLK.to(torch.int16).flatten(1))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the first positions of one slot to another."""
        self.routes_SCLK[target, :length] = self.routes_SCLK[source, :length]


class SlotCache(RouteTable):
    """KV cache of all slots."""

    def __init__(
        self, spec: ModelSpec, slots: int, positions: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(spec, slots, positions)
        groups, head_dim = spec.num_query_groups, spec.head_dim
        # Zeros, not empty: a masked position has weight 0, and 0 * NaN would still be NaN.
        self.keys_LSGdC = torch.zeros(
            spec.num_layers, slots, groups, head_dim, positions, dtype=dtype
        )
        self.values_LSGCd = torch.zeros(
            spec.num_layers, slots, groups, positions, head_dim, dtype=dtype
        )
        self._slot_views: dict[int, tuple[Tensor, Tensor]] = {}
        self._flat_keys = [layer.view(-1) for layer in self.keys_LSGdC]
        self._flat_values = [layer.view(-1, head_dim) for layer in self.values_LSGCd]
        rows = np.arange(slots * groups * head_dim, dtype=np.int64) * positions
        self._key_base_S = rows.reshape(slots, groups * head_dim)
        rows = np.arange(slots * groups, dtype=np.int64) * positions
        self._value_base_S = rows.reshape(slots, groups)

    def write_indices(self, slots_N: np.ndarray, positions_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """Flat element indices of keys and flat row indices of values, equal for every layer."""
        column = positions_N[:, None]
        keys = (self._key_base_S[slots_N] + column).reshape(-1)
        values = (self._value_base_S[slots_N] + column).reshape(-1)
        return torch.from_numpy(keys), torch.from_numpy(values)

    def write_layer(
        self, layer: int, indices: tuple[Tensor, Tensor], keys_NGd: Tensor, values_NGd: Tensor
    ) -> None:
        """Stores one layer's keys and values of N rows."""
        flat_values = self._flat_values[layer]
        if flat_values.dtype is not keys_NGd.dtype:
            keys_NGd, values_NGd = keys_NGd.to(flat_values.dtype), values_NGd.to(flat_values.dtype)
        self._flat_keys[layer].scatter_(0, indices[0], keys_NGd.reshape(-1))
        flat_values.index_copy_(0, indices[1], values_NGd.reshape(-1, flat_values.shape[1]))

    def range_views(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys [L, count*G, d, C] and values [L, count*G, C, d] of neighbouring slots in place."""
        if count == 1 and first in self._slot_views:  # views cost more to make than to look up
            return self._slot_views[first]
        views = (
            self.keys_LSGdC.narrow(1, first, count).flatten(1, 2),
            self.values_LSGCd.narrow(1, first, count).flatten(1, 2),
        )
        if count == 1:
            self._slot_views[first] = views
        return views

    def run_layers(self, slot: int, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Places of keys and values of consecutive positions, both [n, G, d], a layer each. What is
        copied into them is stored.
        """
        keys_LGdC, values_LGCd = self.range_views(slot, 1)
        keys_LnGd = keys_LGdC.narrow(3, start, end - start).permute(0, 3, 1, 2)
        values_LnGd = values_LGCd.narrow(2, start, end - start).transpose(1, 2)
        return list(zip(keys_LnGd.unbind(0), values_LnGd.unbind(0), strict=True))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the first positions of one slot to another."""
        super().copy_prefix(source, target, length)
        self.keys_LSGdC[:, target, :, :, :length] = self.keys_LSGdC[:, source, :, :, :length]
        self.values_LSGCd[:, target, :, :length] = self.values_LSGCd[:, source, :, :length]
