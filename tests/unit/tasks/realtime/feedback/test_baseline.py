"""The baseline that replaces the group mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.tasks.realtime.config import BaselineConfig
from ostinato.tasks.realtime.feedback.baseline import Baselines, DistilledReward, advantages

CONFIG = BaselineConfig()
REWARDS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.floats(-1, 1)),
    min_size=1,
    max_size=30,
)


def observed(*rows: tuple[str, str, float]) -> list[DistilledReward]:
    return [
        DistilledReward(
            interaction_id=str(index),
            judged_id=str(index),
            population=row[0],
            problem_kind=row[1],
            reward=row[2],
            reason="",
            terms={},
        )
        for index, row in enumerate(rows)
    ]


@given(REWARDS, st.data())
def test_own_reward_never_moves_its_own_baseline(
    rows: list[tuple[str, str, float]], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(rows) - 1))
    changed = list(rows)
    changed[index] = (*rows[index][:2], data.draw(st.floats(-1, 1)))
    before = advantages(observed(*rows), Baselines())[index]
    after = advantages(observed(*changed), Baselines())[index]
    # equal baselines: the advantages differ by exactly the change of the reward
    assert before - after == pytest.approx(rows[index][2] - changed[index][2], abs=1e-9)


def test_small_cell_leans_on_the_overall_mean_and_a_large_one_on_itself() -> None:
    rows = [("people", "common", 0.5)] * 400 + [("people", "rare", -1.0)]
    baselines = Baselines().absorb(observed(*rows), CONFIG)
    assert baselines.expected("people", "common") == pytest.approx(0.5, abs=0.02)
    assert baselines.expected("people", "rare") > 0.2
    assert baselines.expected("people", "never seen") == pytest.approx(0.49, abs=0.02)


def test_kinds_have_their_own_expectation() -> None:
    rows = [("people", "easy", 1.0), ("people", "hard", -1.0)] * 100
    values = advantages(observed(*rows), Baselines())
    assert max(abs(value) for value in values) < 0.2  # both earn what was expected of them


def test_earlier_cycles_fade() -> None:
    old = Baselines().absorb(observed(*[("p", "k", -1.0)] * 64), CONFIG)
    new = old
    for _ in range(6):
        new = new.absorb(observed(*[("p", "k", 1.0)] * 64), CONFIG)
    assert old.expected("p", "k") < -0.8
    assert new.expected("p", "k") > 0.8


@given(REWARDS)
def test_baselines_survive_json(rows: list[tuple[str, str, float]]) -> None:
    baselines = Baselines().absorb(observed(*rows), CONFIG)
    assert Baselines.model_validate(json.loads(baselines.model_dump_json())) == baselines


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6), st.integers(1, 5))
def test_rewards_of_one_feedback_count_once(rewards: list[float], repeats: int) -> None:
    once = observed(*[("p", "k", reward) for reward in rewards])
    often = [once[0]] * repeats + once[1:]
    wanted = advantages(once, Baselines())
    assert advantages(often, Baselines()) == pytest.approx([wanted[0]] * repeats + wanted[1:])
    absorbed, again = (Baselines().absorb(seen, CONFIG) for seen in (once, often))
    assert again.expected("p", "k") == pytest.approx(absorbed.expected("p", "k"))
