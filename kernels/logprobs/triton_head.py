"""Output matrix, log-probability and entropy in one pass in Triton.

CUDA path of `token_logprobs_op`. Logits of a tile stay in registers. The forward pass writes a few
numbers per token and vocabulary split, which are joined in order afterwards. The backward pass
recomputes the logits of some thousand tokens at a time, as gradients in the hidden states' dtype,
and multiplies these twice. There is never a tensor of all tokens by the vocabulary.

Shapes: N tokens, C tokens of a chunk, V vocabulary, D model width, X splits of the vocabulary.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.logprobs.op import token_logprobs_op

TILE = (128, 128, 64)
# Fastest of those measured on an H100 with 8192 tokens, 151936 x 2048. The number of splits does
# not depend on the number of tokens, so that a token's sums do not either.
NUM_WARPS = 8
NUM_SPLITS = 4
CHUNK_TOKENS = 4096
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def logits_tile(
    hidden_ptr,
    head_ptr,
    row,
    column,
    num_tokens,
    vocabulary,
    width,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Logits in fp32 of a tile of tokens and vocabulary. LOWEST outside the vocabulary."""
    rows, columns = row + tl.arange(0, BLOCK_T), column + tl.arange(0, BLOCK_V)
    parts = tl.arange(0, BLOCK_D)
    left = hidden_ptr + rows.to(tl.int64)[:, None] * width + parts[None, :]
    right = head_ptr + columns.to(tl.int64)[None, :] * width + parts[:, None]
    sums = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, width, BLOCK_D):
        is_inside = parts < width - start
        a = tl.load(left + start, mask=(rows < num_tokens)[:, None] & is_inside[None, :], other=0.0)
        b = tl.load(
            right + start, mask=(columns < vocabulary)[None, :] & is_inside[:, None], other=0.0
        )
        sums = tl.dot(a, b, sums)
    return tl.where((columns < vocabulary)[None, :], sums, LOWEST)


@triton.jit
def scores_kernel(
    hidden_ptr,
    head_ptr,
    targets_ptr,
    partial_ptr,
    num_tokens,
    vocabulary,
    width,
    split_columns,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Running maximum, sums of powers and of powers times logits, target logit: grid (splits, token tiles)."""
    row = tl.program_id(1) * BLOCK_T
    rows = row + tl.arange(0, BLOCK_T)
    targets = tl.load(targets_ptr + rows, mask=rows < num_tokens, other=-1)
    top = tl.full((BLOCK_T,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    weighted = tl.zeros((BLOCK_T,), tl.float32)
    target = tl.zeros((BLOCK_T,), tl.float32)
    first = tl.program_id(0) * split_columns
    for column in range(first, tl.minimum(first + split_columns, vocabulary), BLOCK_V):
        logits = logits_tile(
            hidden_ptr,
            head_ptr,
            row,
            column,
            num_tokens,
            vocabulary,
            width,
            BLOCK_T,
            BLOCK_V,
            BLOCK_D,
        )
        columns = column + tl.arange(0, BLOCK_V)
        higher = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp(top - higher)
        powers = tl.where((columns < vocabulary)[None, :], tl.exp(logits - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(powers, 1)
        weighted = weighted * shrink + tl.sum(powers * logits, 1)
        target += tl.sum(tl.where(columns[None, :] == targets[:, None], logits, 0.0), 1)
        top = higher
    out = partial_ptr + tl.program_id(0) * 4 * num_tokens + rows
    mask = rows < num_tokens
    tl.store(out, top, mask=mask)
    tl.store(out + num_tokens, total, mask=mask)
    tl.store(out + 2 * num_tokens, weighted, mask=mask)
    tl.store(out + 3 * num_tokens, target, mask=mask)


@triton.jit
def gradient_kernel(
    hidden_ptr,
    head_ptr,
    targets_ptr,
    normalizer_ptr,
    grads_ptr,
    out_ptr,
    num_tokens,
    vocabulary,
    width,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile of the logits' gradient: grad * (one-hot of the target - probability)."""
    row, column = tl.program_id(1) * BLOCK_T, tl.program_id(0) * BLOCK_V
    rows, columns = row + tl.arange(0, BLOCK_T), column + tl.arange(0, BLOCK_V)
    is_token = rows < num_tokens
    logits = logits_tile(
        hidden_ptr, head_ptr, row, column, num_tokens, vocabulary, width, BLOCK_T, BLOCK_V, BLOCK_D
    )
    targets = tl.load(targets_ptr + rows, mask=is_token, other=-1)
    normalizer = tl.load(normalizer_ptr + rows, mask=is_token, other=0.0)
    grads = tl.load(grads_ptr + rows, mask=is_token, other=0.0)
    hot = (columns[None, :] == targets[:, None]).to(tl.float32)
    result = grads[:, None] * (hot - tl.exp(logits - normalizer[:, None]))
    offsets = rows.to(tl.int64)[:, None] * vocabulary + columns[None, :]
    mask = is_token[:, None] & (columns < vocabulary)[None, :]
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


def options_of(dtype: torch.dtype) -> dict[str, int]:
    """Warps and stages. A fourth stage of fp32 tiles does not fit shared memory."""
    return {"num_warps": NUM_WARPS, "num_stages": 4 if dtype.itemsize == 2 else 3}


def head_scores_triton(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and normalizers (log-sum-exp of the logits), each [N] in nats."""
    (tokens, width), vocabulary = hidden_ND.shape, head_VD.shape[0]
    split = triton.cdiv(triton.cdiv(vocabulary, NUM_SPLITS), TILE[1]) * TILE[1]
    splits = triton.cdiv(vocabulary, split)
    partial = hidden_ND.new_empty((splits, 4, tokens), dtype=torch.float32)
    scores_kernel[(splits, triton.cdiv(tokens, TILE[0]))](
        hidden_ND.contiguous(), head_VD.contiguous(), targets_N, partial, tokens, vocabulary, width,
        split, *TILE, **options_of(hidden_ND.dtype),
    )  # fmt: skip
    top_XN, total_XN, weighted_XN, target_XN = partial.unbind(1)
    top_N = top_XN.amax(0)
    shrink_XN = (top_XN - top_N).exp()
    total_N = (total_XN * shrink_XN).sum(0)
    normalizer_N = top_N + total_N.log()
    mean_N = (weighted_XN * shrink_XN).sum(0) / total_N
    return target_XN.sum(0) - normalizer_N, normalizer_N - mean_N, normalizer_N


def head_gradient_triton(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, normalizer_N: Tensor, grad_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and output matrix, some thousand tokens at a time."""
    (tokens, width), vocabulary = hidden_ND.shape, head_VD.shape[0]
    hidden_ND, head_VD = hidden_ND.contiguous(), head_VD.contiguous()
    grad_hidden_ND = torch.empty_like(hidden_ND)
    grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32)
    for start in range(0, tokens, CHUNK_TOKENS):
        rows = slice(start, min(start + CHUNK_TOKENS, tokens))
        count = rows.stop - start
        grads_CV = hidden_ND.new_empty(count, vocabulary)
        gradient_kernel[(triton.cdiv(vocabulary, TILE[1]), triton.cdiv(count, TILE[0]))](
            hidden_ND[rows], head_VD, targets_N[rows], normalizer_N[rows], grad_N[rows].contiguous(),
            grads_CV, count, vocabulary, width, *TILE, **options_of(hidden_ND.dtype),
        )  # fmt: skip
        torch.mm(grads_CV, head_VD, out=grad_hidden_ND[rows])
        grad_head_VD += torch.mm(grads_CV.T, hidden_ND[rows])
    return grad_hidden_ND, grad_head_VD.to(head_VD.dtype)


class _TokenLogprobs(torch.autograd.Function):
    """Forward and backward of `token_logprobs_triton`. No logits are kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, normalizer_N = head_scores_triton(hidden_ND, head_VD, targets_N)
        ctx.save_for_backward(hidden_ND, head_VD, targets_N, normalizer_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*head_gradient_triton(*ctx.saved_tensors, grad_N), None)


@token_logprobs_op.register_cuda
def token_logprobs_triton(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities, and entropies, which have no extra cost here."""
    return _TokenLogprobs.apply(hidden_ND, head_VD, targets_N)  # type: ignore[no-any-return]
