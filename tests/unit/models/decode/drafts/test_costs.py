"""What steps cost: measured means against a line, outliers cut, unmeasured drafts cheap."""

import pytest

from ostinato.models.decode.drafts.policy import StepCosts

MARGIN = 1.05  # by which drafts must pay


def test_nothing_measured_costs_nothing_more() -> None:
    assert StepCosts(3).relative_w.tolist() == [1, 1, 1, 1]


def test_unmeasured_drafts_look_cheap_until_they_are_tried() -> None:
    costs = StepCosts(4)
    costs.record(0, 1.0)
    assert 1 < costs.relative_w[4] < 1.5
    for _ in range(100):
        costs.record(0, 1.0)
        costs.record(2, 1.9)
        costs.record(4, 2.9)
    assert costs.relative_w[2] == pytest.approx(MARGIN * 1.9, rel=0.03)
    assert costs.relative_w[3] == pytest.approx(
        MARGIN * 2.4, rel=0.1
    )  # never measured: on the line
    assert costs.relative_w[4] == pytest.approx(MARGIN * 2.9, rel=0.03)


def test_an_interrupted_step_counts_for_two_at_most() -> None:
    costs = StepCosts(2)
    for step in range(100):
        costs.record(0, 1.0)
        costs.record(1, 1.5 if step != 80 else 500.0)
    assert costs.relative_w[1] < MARGIN * 1.6


@pytest.mark.parametrize("slow", [0, 1])
def test_code_loaded_in_a_first_step_is_not_its_cost(slow: int) -> None:
    costs, first = StepCosts(2), [True, True]
    for step in range(60):
        drafts = step % 2
        costs.record(drafts, 4000.0 if drafts == slow and first[drafts] else 1.0 + 0.5 * drafts)
        first[drafts] = False
    assert costs.relative_w[1] == pytest.approx(MARGIN * 1.5, rel=0.1)


def test_costs_follow_what_changes() -> None:
    costs = StepCosts(2)
    for seconds in (1.2, 2.2):
        for _ in range(900):
            costs.record(0, 1.0)
            costs.record(2, seconds)
    assert costs.relative_w[2] == pytest.approx(MARGIN * 2.2, rel=0.03)


def test_no_step_with_drafts_is_cheaper_than_one_without() -> None:
    costs = StepCosts(2)
    for _ in range(100):
        costs.record(0, 1.0)
        costs.record(2, 0.5)
    assert (costs.relative_w >= 1).all()
