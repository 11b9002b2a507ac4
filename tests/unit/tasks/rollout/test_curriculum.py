"""Problem choice."""

import math
from collections import Counter

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.rollout import curriculum as rules
from ostinato.tasks.rollout.config import CurriculumConfig
from ostinato.tasks.rollout.curriculum import Curriculum, spread_probability
from tests.fakes.rollouts import make_problem


def make_curriculum(rates: list[float | None], revisit_groups: int = 1) -> Curriculum:
    problems = [make_problem(f"p{index}", rate) for index, rate in enumerate(rates)]
    config = CurriculumConfig(revisit_groups=revisit_groups)
    return Curriculum(problems, config, group_size=8, seed=3)


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
    curriculum = make_curriculum([None] * 60)
    for index in range(60):
        for _ in range(6):
            curriculum.observe(f"p{index}", attempts=8, solved=(8, 3, 0)[index % 3])
    counts = Counter(int(curriculum.draw(()).problem_id[1:]) % 3 for _ in range(400))
    assert counts[1] > 4 * counts[0] > 0
    assert counts[1] > 4 * counts[2] > 0


def test_uniform_weights_ignore_results() -> None:
    config = CurriculumConfig(weight="uniform", revisit_groups=1)
    problems = [make_problem(f"p{index}") for index in range(4)]
    curriculum = Curriculum(problems, config, group_size=8, seed=3)
    curriculum.observe("p0", attempts=8, solved=8)
    assert {curriculum.weight(problem.problem_id) for problem in problems} == {1.0}


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf, None, "much"])
def test_a_rule_without_a_positive_number_is_named_with_its_problem(
    monkeypatch: pytest.MonkeyPatch, weight: object
) -> None:
    monkeypatch.setattr(rules, "uniform_weight", lambda *_: weight)
    config = CurriculumConfig(weight="uniform")
    curriculum = Curriculum([make_problem("p0")], config, group_size=8, seed=3)
    with pytest.raises(ConfigError, match="curriculum 'uniform' gives problem p0 the weight"):
        curriculum.draw(())


def test_a_problem_is_drawn_once_by_default_also_over_a_restart() -> None:
    curriculum = make_curriculum([None] * 20, CurriculumConfig().revisit_groups)
    before = {number: curriculum.draw(()).problem_id for number in range(12)}
    resumed = make_curriculum([None] * 20, CurriculumConfig().revisit_groups)
    resumed.resume(before)
    after = [resumed.draw(()).problem_id for _ in range(8)]
    assert len({*before.values(), *after}) == 20
    assert resumed.is_exhausted


def test_a_resumed_curriculum_draws_what_the_first_process_would_have_drawn() -> None:
    first, resumed = make_curriculum([None] * 9, 4), make_curriculum([None] * 9, 4)
    resumed.resume({number: first.draw(()).problem_id for number in range(7)})
    assert [resumed.draw(()) for _ in range(9)] == [first.draw(()) for _ in range(9)]


def test_a_revisit_has_that_many_groups_of_others_in_between() -> None:
    curriculum = make_curriculum([None] * 8, revisit_groups=5)
    names = [curriculum.draw(()).problem_id for _ in range(60)]
    gaps = [names[at + 1 :].index(name) for at, name in enumerate(names[:40])]
    assert min(gaps) == 5
    assert not curriculum.is_exhausted


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
