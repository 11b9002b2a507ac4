"""Order laws of fusion."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.search.field_scores import fuse_standardised

SCORES = st.lists(
    st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=20
).map(lambda rows: np.array(rows, dtype=np.float64).T)
WEIGHTS = st.sampled_from([0.1, 0.7, 1.0, 3.0])


@settings(deadline=None)
@given(scores=SCORES, weight=WEIGHTS)
def test_a_row_that_is_better_in_both_stands_higher(scores, weight: float) -> None:
    fused = fuse_standardised(scores[0], scores[1], weight)
    better = (scores[0][:, None] > scores[0]) & (scores[1][:, None] > scores[1])

    assert (fused[:, None] > fused)[better].all()


@settings(deadline=None)
@given(scores=SCORES)
def test_without_weight_the_first_order_stays(scores) -> None:
    fused = fuse_standardised(scores[0], scores[1], 0.0)

    assert ((fused[:, None] > fused) == (scores[0][:, None] > scores[0])).all()


@settings(deadline=None)
@given(scores=SCORES, weight=WEIGHTS, scale=st.sampled_from([0.5, 4.0]), shift=st.integers(-9, 9))
def test_scale_and_offset_of_a_score_do_not_matter(scores, weight, scale, shift) -> None:
    plain = fuse_standardised(scores[0], scores[1], weight)

    assert fuse_standardised(scores[0] * scale + shift, scores[1], weight) == pytest.approx(plain)


def test_equal_scores_say_nothing() -> None:
    words = np.array([3.0, 1.0, 2.0])

    assert np.argsort(-fuse_standardised(words, np.ones(3), 5.0)).tolist() == [0, 2, 1]
