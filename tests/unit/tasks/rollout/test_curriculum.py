"""Problem choice."""

from collections import Counter

import pytest

from ostinato.tasks.rollout.curriculum import Curriculum, spread_probability
from tests.fakes.rollouts import make_problem


def make_curriculum(rates: list[float | None]) -> Curriculum:
    problems = [make_problem(f"p{index}", rate) for index, rate in enumerate(rates)]
    return Curriculum(problems, group_size=8, seed=3)


def test_same_history_draws_the_same_problems() -> None:
    def draw() -> list[str]:
        curriculum = make_curriculum([None] * 20)
        names = []
        for index in range(30):
            name = curriculum.draw(()).problem_id
            curriculum.observe(name, attempts=8, solved=index % 9)
            names.append(name)
        return names

    assert draw() == draw()


def test_mixed_problems_are_drawn_more_than_solved_and_hopeless_ones() -> None:
    curriculum = make_curriculum([None, None, None])
    for _ in range(6):
        curriculum.observe("p0", attempts=8, solved=8)
        curriculum.observe("p1", attempts=8, solved=3)
        curriculum.observe("p2", attempts=8, solved=0)
    counts = Counter(curriculum.draw(()).problem_id for _ in range(400))
    assert counts["p1"] > 4 * counts["p0"]
    assert counts["p1"] > 4 * counts["p2"]
    assert counts["p0"] > 0
    assert counts["p2"] > 0


def test_problem_in_flight_is_left_alone_while_others_are_free() -> None:
    curriculum = make_curriculum([None, None])
    assert {curriculum.draw({"p0"}).problem_id for _ in range(20)} == {"p1"}
    assert curriculum.draw({"p0", "p1"}).problem_id in {"p0", "p1"}


def test_old_results_fade() -> None:
    curriculum = make_curriculum([None])
    for _ in range(5):
        curriculum.observe("p0", attempts=8, solved=8)
    solved_weight = curriculum.weight("p0")
    for _ in range(8):
        curriculum.observe("p0", attempts=8, solved=4)
    assert curriculum.weight("p0") > 2 * solved_weight


def test_spread_probability_of_a_sharp_posterior_is_the_binomial_one() -> None:
    rate = 0.3
    sharp = spread_probability(rate * 1e6, (1 - rate) * 1e6, 8)
    assert sharp == pytest.approx(1 - rate**8 - (1 - rate) ** 8, abs=1e-4)
