"""The door to compiled decoding: importing the rest loads numba, so that it happens only where asked.

Owns `load_native_trunk`, the one place that imports it. Leaves: a `NativeTrunk`.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from models.decode.cache import SlotCache
from models.spec import ModelSpec

if TYPE_CHECKING:
    from models.decode.native_trunk import NativeTrunk


def load_native_trunk(
    spec: ModelSpec, rotation_C1d: Tensor, cache: SlotCache, rows: int
) -> "NativeTrunk":
    """Compiled loops for a shape; `rows` is the most that one step feeds."""
    from models.decode.native_trunk import NativeTrunk  # noqa: PLC0415 - importing it compiles

    return NativeTrunk(spec, rotation_C1d, cache, rows)
