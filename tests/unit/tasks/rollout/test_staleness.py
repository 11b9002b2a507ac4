"""Admission, pacing and the bound."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.tasks.rollout.staleness import StalenessPolicy


def test_capacity_at_equal_versions_is_the_published_formula() -> None:
    policy = StalenessPolicy(max_staleness_versions=2, groups_per_step=4)
    trained, buffered, running = 12, 3, 5
    outstanding = buffered + running
    published = (2 + 3 + 1) * 4 - (trained + outstanding)
    assert (
        policy.capacity(trainer_version=3, engine_version=3, outstanding_groups=outstanding)
        == published
    )


def test_capacity_shrinks_while_engines_lag_behind() -> None:
    policy = StalenessPolicy(max_staleness_versions=1, groups_per_step=4)
    assert policy.capacity(trainer_version=5, engine_version=4, outstanding_groups=0) == 4
    assert policy.capacity(trainer_version=5, engine_version=3, outstanding_groups=0) == 0


def test_synchronous_policy_starts_exactly_one_step() -> None:
    policy = StalenessPolicy(max_staleness_versions=0, groups_per_step=4)
    assert policy.capacity(trainer_version=7, engine_version=7, outstanding_groups=1) == 3


def test_tight_birth_of_a_schedulable_remainder_is_none() -> None:
    policy = StalenessPolicy(max_staleness_versions=2, groups_per_step=2)
    assert policy.latest_birth_version([0, 0, 1, 1], trainer_version=0) is None


def test_tight_birth_names_the_first_group_without_room() -> None:
    policy = StalenessPolicy(max_staleness_versions=2, groups_per_step=2)
    assert policy.latest_birth_version([0, 1, 1, 0], trainer_version=1) is None
    assert policy.latest_birth_version([0, 0, 0, 2], trainer_version=1) == 0


@given(
    births=st.lists(st.integers(0, 6), max_size=14),
    version=st.integers(0, 6),
    cap=st.integers(0, 4),
    size=st.integers(1, 4),
)
def test_tight_birth_agrees_with_training_oldest_first(
    births: list[int], version: int, cap: int, size: int
) -> None:
    """None exactly when the steps after this one, oldest first, can train every group in time."""
    policy = StalenessPolicy(cap, size)
    births = [min(birth, version) for birth in births]
    waiting, at, lost = sorted(births), version + 1, False
    while waiting:
        lost = lost or policy.is_stale(waiting[0], at)
        waiting, at = waiting[size:], at + 1
        lost = lost or any(policy.is_stale(birth, at) for birth in waiting[:1])
    assert (policy.latest_birth_version(births, version) is None) == (not lost)
