"""The plain formula of the weighted SwiGLU, to check `op.py` against.

Shapes: P rows, F inner width, G = 2F with gate columns before up columns.
"""

from torch import Tensor
from torch.nn import functional


def swiglu_reference(inner_PG: Tensor, scale_P: Tensor) -> Tensor:
    """Scale times silu(gate) times up, differentiable, in the inputs' precision."""
    gate_PF, up_PF = inner_PG.chunk(2, dim=-1)
    return functional.silu(gate_PF) * up_PF * scale_P[:, None]
