"""Layouts: ranks lie where Megatron puts them, and numbers that do not divide are named."""

import pytest
from megatron.core.parallel_state import RankGenerator

from ostinato.models.layout import ParallelLayout
from tests.fakes.small_spec import make_spec

ORDER = "tp-cp-ep-dp-pp"  # Megatron's default
AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
EXPERT_AXES = {"tp": "expert_tensor", "ep": "expert", "dp": "expert_data", "pp": "pipeline"}
MODEL = make_spec(
    512, 64, heads=(8, 4, 8), experts=(8, 2, 32), num_layers=4, max_sequence_tokens=64
)


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (1, {}),
        (8, {"tensor": 2, "expert": 4}),
        (16, {"tensor": 2, "context": 2, "pipeline": 2, "expert": 4}),
        (16, {"tensor": 2, "expert": 2, "expert_tensor": 4}),
        (64, {"tensor": 4, "context": 2, "pipeline": 4, "expert": 8, "expert_tensor": 2}),
    ],
)
def test_ranks_lie_in_megatrons_groups(world: int, degrees: dict[str, int]) -> None:
    layout = ParallelLayout.over(world, **degrees)
    own = RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order=ORDER
    )
    experts = RankGenerator(
        tp=layout.expert_tensor,
        ep=layout.expert,
        dp=layout.expert_data,
        pp=layout.pipeline,
        cp=1,
        order=ORDER,
    )
    places = [place._asdict() for place in layout.places()]

    for generator, axes in ((own, AXES), (experts, EXPERT_AXES)):
        for token, axis in axes.items():
            for group in generator.get_ranks(token):
                assert [places[rank][axis] for rank in group] == list(range(len(group)))
                others = set(axes.values()) - {axis}
                assert len({tuple(places[rank][name] for name in others) for rank in group}) == 1


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tensor": 8}, "tensor=8 does not divide num_query_groups=4"),
        ({"expert": 16}, "expert=16 does not divide num_experts=8"),
        ({"pipeline": 8}, "does not divide num_layers=4"),
        ({"interleave": 2}, "interleave=2 with pipeline=1"),
    ],
)
def test_a_number_that_does_not_divide_is_named(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout.over(16, **degrees).check(MODEL)


def test_degrees_that_ranks_do_not_divide_into_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted a divisor of the 8 ranks"):
        ParallelLayout.over(8, tensor=3)
    with pytest.raises(ValueError, match="wanted a divisor of the 4 ranks of a pipeline stage"):
        ParallelLayout.over(8, pipeline=2, expert=8)
