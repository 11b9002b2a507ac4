"""The attention kernel equals softmax attention, forward and backward."""

import pytest
import torch

from ostinato.kernels.attention.op import LONGEST_KEPT_TOKENS, causal_attention
from ostinato.kernels.attention.reference import causal_attention_reference

SHAPES = [(3, 2, 7), (17, 1, 130), (2, 3, 300), (1, 3, LONGEST_KEPT_TOKENS + 5)]


@pytest.mark.parametrize("earlier", [0, 150])
@pytest.mark.parametrize("value_width", [4, 3])
@pytest.mark.parametrize(("heads", "repeats", "num_tokens"), SHAPES)
def test_causal_attention_equals_reference(
    heads: int, repeats: int, num_tokens: int, value_width: int, earlier: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = (heads, repeats, num_tokens, 4)
    num_tokens += earlier  # keys of tokens before the first query
    shapes = (queries, (heads, num_tokens, 4), (heads, num_tokens, value_width))
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    direction = torch.randn((*queries[:3], value_width), generator=generator, dtype=torch.float64)
    output, expected = causal_attention(*leaves), causal_attention_reference(*leaves)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    grads = torch.autograd.grad(output, leaves, direction)
    wanted = torch.autograd.grad(expected, leaves, direction)
    torch.testing.assert_close(grads, wanted, atol=1e-12, rtol=1e-12)


def test_causal_attention_later_tokens_do_not_change_earlier_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 1, 9, 4, generator=generator) for _ in range(3))
    whole = causal_attention(query, key[:, 0], value[:, 0])
    part = causal_attention(query[:, :, :5], key[:, 0, :5], value[:, 0, :5])
    torch.testing.assert_close(whole[:, :, :5], part)


def test_causal_attention_keeps_memory_linear_in_a_long_row() -> None:
    kept = []
    for num_tokens in (2048, 4096):
        leaves = [torch.randn(1, 1, num_tokens, 8, requires_grad=True)]
        leaves += [torch.randn(1, num_tokens, 8, requires_grad=True) for _ in range(2)]
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor,
            lambda tensor: tensor,
        ):
            causal_attention(*leaves)
        kept.append(sum(sizes))
    assert kept[1] <= 2.1 * kept[0]
