"""Grouped products as loops over experts in fp64, to check every other path against.

Shapes: P rows, E experts, N and K the width of a row before and after a weight.
"""

import torch
from torch import Tensor


def grouped_mm_reference(rows_PK: Tensor, weights_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Returns out_PN: each expert's rows times its transposed weight. Zeros in rows without expert."""
    out_PN = torch.zeros(rows_PK.shape[0], weights_ENK.shape[1], dtype=torch.float64)
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        out_PN[start:end] = rows_PK[start:end].double() @ weights_ENK[expert].double().T
        start = end
    return out_PN


def grouped_wgrad_reference(grads_PN: Tensor, rows_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Returns grads_ENK: for each expert its gradients transposed times its rows."""
    grads = torch.zeros(ends_E.numel(), grads_PN.shape[1], rows_PK.shape[1], dtype=torch.float64)
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        grads[expert] = grads_PN[start:end].double().T @ rows_PK[start:end].double()
        start = end
    return grads
