"""Key/value memory on the decoding device, with one slot more than there are sessions.

Padding rows write to the last slot, the scratch slot, which no request reads. Keys and values of a
position lie side by side, heads behind positions, so that a row is one write and a run of slots is
read where it lies. Routes stay on the host (`RouteTable`): they come back with the samples anyway.
It does not know requests.

Shapes: L layers, P slots and the scratch slot, C positions, G key/value heads, d head width, N rows,
A attended slots, T keys.
"""

import torch
from torch import Tensor

from ostinato.models.decode.cache import RouteTable
from ostinato.models.spec import ModelSpec


class StaticCache(RouteTable):
    """What was computed for each position, where it is computed."""

    def __init__(
        self, spec: ModelSpec, slots: int, positions: int, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__(spec, slots, positions)
        self.scratch_slot = slots
        shape = (spec.num_layers, slots + 1, positions, spec.num_query_groups, spec.head_dim)
        # Zeros, not empty: a masked position has weight 0, and 0 * NaN would still be NaN.
        self.keys_LPCGd = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LPCGd = torch.zeros(shape, dtype=dtype, device=device)
        width = spec.num_query_groups * spec.head_dim
        self._memory = list(
            zip(self.keys_LPCGd.unbind(0), self.values_LPCGd.unbind(0), strict=True)
        )
        self._flat = [
            (keys.view(-1, width), values.view(-1, width)) for keys, values in self._memory
        ]

    def write_layer(
        self, layer: int, places_N: Tensor, keys_NGd: Tensor, values_NGd: Tensor
    ) -> None:
        """Stores one layer's keys and values; a place is slot * positions + position."""
        dtype = self.keys_LPCGd.dtype
        keys, values = self._flat[layer]
        keys.index_copy_(0, places_N, keys_NGd.flatten(1).to(dtype))
        values.index_copy_(0, places_N, values_NGd.flatten(1).to(dtype))

    def read_layer(
        self, layer: int, slots_A: Tensor, context: int, *, is_in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [A, G, T, d] of the slots; in place they are the first A slots."""

        def own(memory_PCGd: Tensor) -> Tensor:
            kept = memory_PCGd.narrow(1, 0, context)
            if is_in_place:
                return kept.narrow(0, 0, slots_A.shape[0]).transpose(1, 2)
            return kept.index_select(0, slots_A).transpose(1, 2)

        keys, values = self._memory[layer]
        return own(keys), own(values)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the first positions of one slot to another."""
        super().copy_prefix(source, target, length)
        self.keys_LPCGd[:, target, :length] = self.keys_LPCGd[:, source, :length]
        self.values_LPCGd[:, target, :length] = self.values_LPCGd[:, source, :length]
