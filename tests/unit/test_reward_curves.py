"""Two trainers' rewards beside each other: what they share is no difference, and pairs have to be pairs."""

import pytest

from tests.benchmarks.reward_curves import OURS, PEER, Curve, GroupRow, compare


def make_curve(
    side: str, rewards_by_step: list[list[float]], name: str = "p", period: int = 99
) -> Curve:
    rows = [
        GroupRow(
            step=step,
            problem_id=f"{name}{(step - 1) % period}.{number}",
            rewards=(reward - 0.1, reward + 0.1),
            solved=1,
            tokens=20,
        )
        for step, rewards in enumerate(rewards_by_step, 1)
        for number, reward in enumerate(rewards)
    ]
    waited = (0.5,) if side == PEER else ()
    return Curve(side=side, seed=0, groups=tuple(rows), step_seconds=(1.0,), grading_seconds=waited)


def test_what_a_side_is_better_by_throughout_is_no_difference_of_the_gains() -> None:
    rewards = [[0.1, 0.3], [0.2, 0.5], [0.5, 0.8]]
    better = [[low + 0.04, high + 0.06] for low, high in rewards]
    figures = compare([make_curve(OURS, better), make_curve(PEER, rewards)])
    assert figures["difference"]["mean"] == pytest.approx(0.05)
    assert figures["difference_of_gains"]["mean"] == pytest.approx(0.0)
    for side in (OURS, PEER):
        assert figures[side]["gain"]["mean"] == pytest.approx(0.45)
        assert figures[side]["gain_by_seed"] == {0: pytest.approx(0.45)}


def test_sides_with_other_problems_are_not_compared() -> None:
    ours, other = make_curve(OURS, [[0.1, 0.2]]), make_curve(PEER, [[0.1, 0.2]], name="q")
    with pytest.raises(ValueError, match="other problems"):
        compare([ours, other])


def test_problems_that_come_again_gain_on_themselves() -> None:
    ours = make_curve(OURS, [[0.1, 0.3], [0.2, 0.5], [0.5, 0.8], [0.3, 0.7]], period=2)
    peer = make_curve(PEER, [[0.1, 0.3], [0.2, 0.5], [0.4, 0.5], [0.3, 0.7]], period=2)
    figures = compare([ours, peer])
    assert figures[OURS]["problem_gain"]["mean"] == pytest.approx((0.4 + 0.5 + 0.1 + 0.2) / 4)
    assert figures["difference_of_problem_gains"]["mean"] == pytest.approx((0.1 + 0.3) / 4)
    assert "problem_gain" not in compare([make_curve(s, [[0.1, 0.2]]) for s in (OURS, PEER)])[OURS]
