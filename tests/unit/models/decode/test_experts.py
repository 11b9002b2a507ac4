"""Every way to add experts is the same formula, and few rows get the same bits in any batch."""

import pytest
import torch
from torch import Tensor

from ostinato.models.decode.experts import ExpertBags, add_experts
from ostinato.models.decode.forward import Trunk
from ostinato.models.decode.weights import DecodeWeights, Precision, prepare_weights
from ostinato.models.spec import ModelSpec
from tests.fakes.tiny_model import TINY, random_weights

# As wide inside as outside, narrower, wider; one expert a token and several.
SPECS = [
    TINY,
    TINY.model_copy(update={"expert_hidden_size": TINY.hidden_size, "experts_per_token": 1}),
    TINY.model_copy(update={"expert_hidden_size": 24, "num_experts": 6, "experts_per_token": 3}),
]


def rows_of(spec: ModelSpec, weights: DecodeWeights, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    normal_ND = torch.randn(rows, spec.hidden_size, generator=generator)
    return normal_ND, *Trunk(spec, 8).route(weights.layers[0], normal_ND)


def plain_sum(weights: DecodeWeights, normal: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    layer = weights.layers[0]
    total = torch.zeros(normal.shape, dtype=torch.float64)
    for row, (chosen, parts) in enumerate(zip(experts.tolist(), shares.tolist(), strict=True)):
        for expert, share in zip(chosen, parts, strict=True):
            inner = normal[row].double() @ layer.expert_up_EDF[expert].double()
            gate, up = inner.chunk(2)
            outer = (torch.nn.functional.silu(gate) * up) @ layer.expert_down_EFD[expert].double()
            total[row] += share * outer
    return total


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 300])
@pytest.mark.parametrize("with_tables", [True, False])
def test_all_ways_are_one_formula(spec: ModelSpec, rows: int, with_tables: bool) -> None:
    weights = prepare_weights(spec, random_weights(spec), 0)
    assert weights.expert_rows is not None
    inputs = rows_of(spec, weights, rows)
    plan = ExpertBags(spec).plan(rows)
    bags = None if plan is None or not with_tables else (plan, weights.expert_rows[0])
    added_ND = torch.ones_like(inputs[0])
    add_experts(weights.layers[0], *inputs, added_ND, bags)
    torch.testing.assert_close(
        added_ND.double() - 1, plain_sum(weights, *inputs), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("spec", SPECS)
def test_few_rows_get_the_same_bits_in_any_batch(spec: ModelSpec) -> None:
    weights = prepare_weights(spec, random_weights(spec), 0)
    assert weights.expert_rows is not None
    inputs, bags = rows_of(spec, weights, 12), ExpertBags(spec)

    def add(start: int, end: int) -> Tensor:
        plan = bags.plan(end - start)
        assert plan is not None
        added = torch.zeros(end - start, spec.hidden_size)
        few = [part[start:end] for part in inputs]
        assert weights.expert_rows is not None
        add_experts(
            weights.layers[0], few[0], few[1], few[2], added, (plan, weights.expert_rows[0])
        )
        return added

    together = add(0, 12)
    for start, end in ((0, 2), (2, 5), (4, 12)):
        assert torch.equal(add(start, end), together[start:end])


@pytest.mark.parametrize(
    ("shape", "most_rows"),
    [
        ({"num_experts": 8, "hidden_size": 128, "expert_hidden_size": 128}, 128),
        ({"num_experts": 128, "hidden_size": 512, "expert_hidden_size": 256}, 192),
        ({"num_experts": 4, "hidden_size": 1024, "expert_hidden_size": 1024}, 6),
    ],
)
def test_bags_end_where_groups_read_less(shape: dict[str, int], most_rows: int) -> None:
    bags = ExpertBags(TINY.model_copy(update=shape | {"experts_per_token": 2}))
    assert bags.plan(1) is None
    assert bags.plan(most_rows) is not None
    assert bags.plan(most_rows + 1) is None


def test_tables_are_kept_for_eager_float32_alone() -> None:
    canonical = random_weights(TINY)
    assert prepare_weights(TINY, canonical, 0).expert_rows is not None
    assert prepare_weights(TINY, canonical, 0, Precision.BF16).expert_rows is None
    assert prepare_weights(TINY, canonical, 0, native=True).expert_rows is None


def test_rounded_weights_add_the_same_up_to_their_precision() -> None:
    exact = prepare_weights(TINY, random_weights(TINY), 0)
    rounded = prepare_weights(TINY, random_weights(TINY), 0, Precision.BF16)
    inputs = rows_of(TINY, exact, 6)
    added_ND = torch.zeros_like(inputs[0])
    add_experts(rounded.layers[0], *inputs, added_ND, None)
    expected = plain_sum(exact, *inputs)
    assert (added_ND - expected).abs().max() < 0.05 * expected.abs().max()
