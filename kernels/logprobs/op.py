"""Log-probabilities of given tokens straight from hidden states and the output matrix.

Logits exist only for one block of tokens at a time. The CPU path keeps their probabilities for the
backward pass, since a CPU lacks arithmetic, not memory; `triton_head.py` recomputes them.

Shapes: N tokens, D model width, V vocabulary, C tokens of a block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.operation import Operation, autocast_dtype

# Row counts are filled up to a multiple of it: oneDNN compiles a product for each new shape.
ROW_QUANTUM = 64
# 512 x 1280 fp32 logits are 2.6 MB: about one L2 cache.
BLOCK_TOKENS = 512


class _TokenLogprobs(torch.autograd.Function):
    """Forward and backward of `token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = hidden_ND.new_empty(targets_N.shape)
        entropy_N = torch.zeros_like(logprobs_N)
        blocks = []
        for start in range(0, targets_N.numel(), BLOCK_TOKENS):
            rows = slice(start, start + BLOCK_TOKENS)
            logits_CV = hidden_ND[rows] @ head_VD.T
            probabilities_CV = torch.softmax(logits_CV, dim=-1)
            # softmax does not return the sum of exponentials; the largest probability is its inverse
            log_sum_C = logits_CV.amax(-1).sub_(probabilities_CV.amax(-1).log_())
            target_C = logits_CV.gather(-1, targets_N[rows, None])[:, 0]
            logprobs_N[rows] = target_C.sub_(log_sum_C)
            if with_entropy:
                mean_C = logits_CV.mul_(probabilities_CV).sum(-1)
                entropy_N[rows] = log_sum_C.sub_(mean_C)
            blocks.append(probabilities_CV)
        ctx.save_for_backward(hidden_ND, head_VD, targets_N)
        ctx.blocks = blocks if any(ctx.needs_input_grad[:2]) else None
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_ND, head_VD, targets_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_head_VD = torch.empty_like(head_VD) if ctx.blocks else torch.zeros_like(head_VD)
        for block, start in enumerate(range(0, targets_N.numel(), BLOCK_TOKENS)):
            rows = slice(start, start + BLOCK_TOKENS)
            # d logprob / d logits = one-hot(target) - probabilities
            grad_CV = ctx.blocks[block] * -grad_N[rows, None]
            grad_CV.scatter_add_(-1, targets_N[rows, None], grad_N[rows, None])
            torch.mm(grad_CV, head_VD, out=grad_hidden_ND[rows])
            grad_head_VD.addmm_(grad_CV.T, hidden_ND[rows], beta=float(block > 0))
        return grad_hidden_ND, grad_head_VD, None, None


@Operation
def token_logprobs_op(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """See `token_logprobs`."""
    num_rows = targets_N.numel()
    missing = -num_rows % ROW_QUANTUM
    if missing:
        hidden_ND = functional.pad(hidden_ND, (0, 0, 0, missing))
        targets_N = functional.pad(targets_N, (0, missing))
    logprobs_N, entropy_N = _TokenLogprobs.apply(hidden_ND, head_VD, targets_N, with_entropy)  # type: ignore[misc]
    return logprobs_N[:num_rows], entropy_N[:num_rows]


def token_logprobs(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of `targets_N` and entropies (zeros unless `with_entropy`), both
    [N] in nats. Under autocast the operands are rounded to its dtype, and products summed in fp32.
    """
    dtype = autocast_dtype(hidden_ND.device)
    if dtype is None:
        return _run_for_dtype(hidden_ND, head_VD, targets_N, with_entropy)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        hidden_ND, head_VD = hidden_ND.to(dtype), head_VD.to(dtype)
        if not hidden_ND.is_cuda:
            hidden_ND, head_VD = hidden_ND.float(), head_VD.float()
        return _run_for_dtype(hidden_ND, head_VD, targets_N, with_entropy)


def _run_for_dtype(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    if hidden_ND.dtype == torch.float32:  # Triton's products would round it to TF32
        return token_logprobs_op.cpu(hidden_ND, head_VD, targets_N, with_entropy)
    return token_logprobs_op(hidden_ND, head_VD, targets_N, with_entropy)
