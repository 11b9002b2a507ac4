"""Laws of advantages and of the KL penalty in the reward."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.tasks.reinforcement.learning.batches.advantages import (
    center_rewards,
    penalize_divergence,
)
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig
from tests.unit.tasks.reinforcement.learning.samples import make_sample

rewards = st.floats(-2, 2, allow_nan=False)


@given(st.lists(rewards, min_size=1, max_size=16))
def test_center_rewards_sum_to_zero_and_keep_differences(values: list[float]) -> None:
    centred = center_rewards(values)
    assert sum(centred) == pytest.approx(0, abs=1e-12)
    assert np.allclose(np.diff(centred), np.diff(values), atol=1e-12)


@given(rewards, st.integers(1, 16))
def test_center_rewards_equal_rewards_are_exactly_zero(value: float, count: int) -> None:
    assert center_rewards([value] * count) == [0.0] * count


def test_center_rewards_is_not_divided_by_the_spread() -> None:
    assert center_rewards([0.0, 0.01]) == pytest.approx([-0.005, 0.005])


def sample_of(index: int, group_id: str, trajectory_id: str | None = None, advantage: float = 0.0):
    sample = make_sample(index, [1, 2], [False, True], advantage=advantage, group_id=group_id)
    return sample.model_copy(update={"trajectory_id": trajectory_id or f"t{index}"})


def test_penalty_far_trajectory_loses_and_near_one_gains() -> None:
    samples = [sample_of(0, "g"), sample_of(1, "g")]
    penalty = penalize_divergence(samples, [3.0, 1.0], ObjectiveConfig(kl_coefficient=0.1))
    assert penalty.advantages == pytest.approx([-0.1, 0.1])
    assert penalty.mean_k1_nats == pytest.approx(2.0)


def test_penalty_is_centred_within_each_group() -> None:
    samples = [sample_of(index, group) for index, group in enumerate("aabb")]
    penalty = penalize_divergence(
        samples, [1.0, 1.0, 5.0, 5.0], ObjectiveConfig(kl_coefficient=1.0)
    )
    assert penalty.advantages == [0.0] * 4


def test_penalty_counts_all_segments_of_a_trajectory_once() -> None:
    samples = [sample_of(0, "g", "long"), sample_of(1, "g", "long"), sample_of(2, "g", "short")]
    penalty = penalize_divergence(samples, [1.0, 2.0, 1.0], ObjectiveConfig(kl_coefficient=1.0))
    assert penalty.advantages == pytest.approx([-1.0, -1.0, 1.0])
