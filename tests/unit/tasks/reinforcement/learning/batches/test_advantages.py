"""Laws of advantages and of the KL penalty in the reward."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.tasks.records import Group, RewardReport, Trajectory
from ostinato.tasks.reinforcement.learning.batches.advantages import (
    center_rewards,
    make_samples,
    penalize_divergence,
)
from ostinato.tasks.reinforcement.learning.batches.credit import samples_of_step
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory
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


def group_of(rewards: list[float], without_tokens: tuple[int, ...] = ()) -> Group:
    """A group with these rewards. The model was never asked in the attempts `without_tokens`."""

    def member(index: int, reward: float) -> Trajectory:
        request = AttemptRequest(f"t{index}", "g", make_problem("p"), index, 0, 1)
        made = make_trajectory(request, versions=() if index in without_tokens else (0, 0))
        return made.model_copy(
            update={"reward": RewardReport(total=reward, terms={"solved": reward})}
        )

    members = tuple(member(index, reward) for index, reward in enumerate(rewards))
    return Group(group_id="g", problem_id="p", trajectories=members)


@pytest.mark.parametrize("divides", [False, True])
def test_rewards_that_differ_by_rounding_are_equal(divides: bool) -> None:
    objective = ObjectiveConfig(divide_by_deviation=divides)
    samples = make_samples(group_of([0.1 + 0.2, 0.3, 0.3]), objective)
    assert [sample.advantage for sample in samples] == [0.0] * 3


@pytest.mark.parametrize("division", ["divide_by_deviation", "divide_by_length"])
def test_attempt_in_which_the_model_was_never_asked_stays_in_the_penalised_mean(
    division: str,
) -> None:
    """As in a third-party program that makes no call: such an attempt has no segment."""
    objective = ObjectiveConfig.model_validate({"kl_coefficient": 0.1, division: True})
    samples = make_samples(group_of([0.0, 1.0, 1.0], without_tokens=(0,)), objective)
    penalty = penalize_divergence(samples, [0.0] * len(samples), objective)
    assert penalty.advantages == [sample.advantage for sample in samples]
    assert min(penalty.advantages[1:]) > 0


@pytest.mark.parametrize("credit", ["trajectory", "edit"])
def test_attempts_without_a_segment_have_a_sample_without_tokens(credit: str) -> None:
    group = group_of([0.0, 0.0], without_tokens=(0, 1))
    samples = samples_of_step([group], ObjectiveConfig.model_validate({"credit": credit}))
    assert [sample.trajectory_id for sample in samples] == ["t0", "t1"]
    assert sum(sample.segment.sampled_tokens for sample in samples) == 0


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
