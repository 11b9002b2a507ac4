"""The length penalty: value, slope, curvature and limits; and the six kinds of effort."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.agent.transcript import TurnRecord
from ostinato.tasks.grading.config import EffortWeights
from ostinato.tasks.grading.rewards import length_penalty, measure_effort, total_effort
from tests.fakes.transcripts import make_call, masked_segment, transcript_of

EFFORT = st.floats(0, 1e6)
CURVE = st.tuples(st.floats(1e-4, 10), st.floats(0, 4))


@given(EFFORT, CURVE)
def test_penalty_matches_its_formula(effort, curve):
    k, q = curve
    if abs(q - 1) > 1e-3:
        expected = ((1 + k * effort) ** (1 - q) - 1) / (k * (1 - q))
        assert length_penalty(effort, k, q) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(EFFORT, st.floats(1e-4, 10))
def test_penalty_at_one_is_the_logarithm_and_continuous_there(effort, k):
    at_one = length_penalty(effort, k, 1.0)
    assert at_one == pytest.approx(math.log1p(k * effort) / k)
    for q in (1 - 1e-9, 1 + 1e-9):
        assert length_penalty(effort, k, q) == pytest.approx(at_one, rel=1e-6)


@given(EFFORT, st.floats(0, 1e5), CURVE)
def test_penalty_grows(effort, more, curve):
    rounding = 1e-15 if curve[1] <= 1 else 0.0  # unbounded there, so an ulp is no fall
    before = length_penalty(effort, *curve)
    assert length_penalty(effort + more, *curve) >= before * (1 - rounding)


@given(EFFORT, CURVE)
def test_penalty_is_at_most_the_effort_and_below_its_bound(effort, curve):
    k, q = curve
    penalty = length_penalty(effort, k, q)
    assert 0 <= penalty <= effort * (1 + 1e-12)
    if q > 1:
        assert penalty <= 1 / (k * (q - 1)) * (1 + 1e-12)


@given(EFFORT, st.floats(1e-4, 10), st.floats(0, 4), st.floats(0, 1))
def test_penalty_falls_with_q(effort, k, q, more):
    assert length_penalty(effort, k, q + more) <= length_penalty(effort, k, q) * (1 + 1e-12)


@given(
    st.lists(st.floats(0, 1e4), min_size=6, max_size=6),
    st.integers(0, 5),
    st.floats(0, 1e4),
    st.permutations(range(6)),
)
def test_more_of_any_kind_of_effort_never_costs_less(kinds, which, more, order):
    names = list(EffortWeights.model_fields)
    effort = dict(zip(names, kinds, strict=True))
    weights = EffortWeights()
    grown = {**effort, names[which]: effort[names[which]] + more}
    assert total_effort(grown, weights) >= total_effort(effort, weights)
    shuffled = {names[index]: effort[names[index]] for index in order}
    assert total_effort(shuffled, weights) == total_effort(effort, weights)


@given(EFFORT, EFFORT, CURVE)
def test_penalty_is_concave(first, second, curve):
    middle = length_penalty((first + second) / 2, *curve)
    chord = (length_penalty(first, *curve) + length_penalty(second, *curve)) / 2
    assert middle >= chord * (1 - 1e-9)


@given(CURVE)
def test_penalty_starts_at_zero_with_slope_one(curve):
    assert length_penalty(0.0, *curve) == 0.0
    tiny = 1e-6 / curve[0]
    assert length_penalty(tiny, *curve) == pytest.approx(tiny, rel=1e-5)


@given(EFFORT, st.floats(1e-4, 10))
def test_penalty_is_linear_at_zero_and_bounded_above_one(effort, k):
    assert length_penalty(effort, k, 0.0) == pytest.approx(effort)
    assert length_penalty(effort, k, 2.0) <= 1 / k * (1 + 1e-12)


@pytest.mark.parametrize(("effort", "k", "q"), [(-1, 1, 1), (1, 0, 1), (1, -2, 1), (1, 1, -1)])
def test_penalty_refuses_bad_values(effort, k, q):
    with pytest.raises(ValueError, match="wanted effort"):
        length_penalty(effort, k, q)


def test_effort_has_its_six_kinds():
    call = make_call("run_terminal")
    calling = TurnRecord(generated_tokens=20, text="hmm, <run_terminal>", calls=(call, call))
    closing = TurnRecord(generated_tokens=7, text="Fixed.", calls=())
    segments = (masked_segment([0, 0, 0, 1, 1, 0, 0, 1, 0]), masked_segment([0, 1, 1, 0]))
    effort = measure_effort(transcript_of([calling, closing], segments))
    thinking = 20 * 5 / 19
    assert effort == pytest.approx(
        {
            "thinking_tokens": thinking,
            "call_tokens": 20 - thinking,
            "output_tokens": 4,
            "final_tokens": 7,
            "tool_calls": 2,
            "turns": 2,
        }
    )
    weights = EffortWeights(
        thinking_tokens=0, call_tokens=0, output_tokens=0, final_tokens=0, tool_calls=1, turns=10
    )
    assert total_effort(effort, weights) == 22
