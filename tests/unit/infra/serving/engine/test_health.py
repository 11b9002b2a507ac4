"""Laws of the health machine, over every state, every event and any history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.serving.engine.health import (
    SILENCES_TO_DEATH,
    TRANSITIONS,
    HealthEvent,
    ReplicaHealth,
    ReplicaState,
    observe,
    observe_report,
)

happenings = st.lists(
    st.tuples(st.sampled_from(list(HealthEvent)), st.sampled_from([None, 1, 2, 3])), max_size=40
)


def step(
    health: ReplicaHealth, event: HealthEvent, process_id: int | None, at: int
) -> ReplicaHealth:
    version = at if event is HealthEvent.VERIFIED else None
    return observe(health, event, at=float(at), process_id=process_id, version=version)


def test_every_state_knows_every_event() -> None:
    assert set(TRANSITIONS) == set(ReplicaState)
    assert all(set(table) == set(HealthEvent) for table in TRANSITIONS.values())


@given(happenings)
def test_trap_16_after_a_loss_or_a_new_process_only_a_verified_apply_leads_to_serving(
    history,
) -> None:
    health, is_verified = ReplicaHealth(), False
    for at, (event, process_id) in enumerate(history):
        before = health
        health = step(health, event, process_id, at)
        is_new = process_id is not None and before.process_id not in (None, process_id)
        if is_new or event in (HealthEvent.LOST, HealthEvent.STARTED, HealthEvent.REFUSED):
            is_verified = False
        if event is HealthEvent.VERIFIED and (before.state is not ReplicaState.DEAD or is_new):
            is_verified = True
        if health.state is ReplicaState.DEAD:
            is_verified = False
        if health.state is ReplicaState.SERVING:
            assert is_verified
            assert health.version is not None


@given(happenings)
def test_a_dead_replica_never_serves_at_once(history) -> None:
    health = ReplicaHealth()
    for at, (event, process_id) in enumerate(history):
        before, health = health, step(health, event, process_id, at)
        if before.state is ReplicaState.DEAD and health.state is ReplicaState.SERVING:
            assert event is HealthEvent.VERIFIED
            assert process_id not in (None, before.process_id)


@given(happenings)
def test_a_version_is_named_only_while_verified_weights_may_be_served(history) -> None:
    health = ReplicaHealth()
    for at, (event, process_id) in enumerate(history):
        health = step(health, event, process_id, at)
        assert (health.version is None) == (
            health.state not in (ReplicaState.SERVING, ReplicaState.SUSPECT)
        )
        assert health.since <= at


@pytest.mark.parametrize("state", list(ReplicaState))
def test_silence_for_long_is_death(state: ReplicaState) -> None:
    health = ReplicaHealth(state, version=1)
    for at in range(SILENCES_TO_DEATH):
        assert health.state is state or health.state is ReplicaState.SUSPECT
        health = observe(health, HealthEvent.SILENT, at=float(at))
    assert health.state is ReplicaState.DEAD


def test_a_suspect_that_answers_serves_again_without_a_new_apply() -> None:
    health = observe(ReplicaHealth(), HealthEvent.VERIFIED, at=0.0, version=4, process_id=1)
    health = observe(health, HealthEvent.SILENT, at=1.0)
    assert health.state is ReplicaState.SUSPECT
    health = observe(health, HealthEvent.ANSWERED, at=2.0, process_id=1)
    assert (health.state, health.version, health.silences) == (ReplicaState.SERVING, 4, 0)


def test_a_suspect_answered_by_another_process_restarts() -> None:
    health = observe(ReplicaHealth(), HealthEvent.VERIFIED, at=0.0, version=4, process_id=1)
    health = observe(health, HealthEvent.SILENT, at=1.0)
    health = observe(health, HealthEvent.ANSWERED, at=2.0, process_id=2)
    assert (health.state, health.version) == (ReplicaState.RESTARTING, None)


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        (ReplicaState.SERVING, ReplicaState.SERVING),
        (ReplicaState.STALE, ReplicaState.STALE),
        (ReplicaState.STARTING, ReplicaState.RESTARTING),
    ],
)
def test_a_dead_replica_that_reports_is_what_it_reports(
    reported: ReplicaState, wanted: ReplicaState
) -> None:
    dead = ReplicaHealth(ReplicaState.DEAD, process_id=1)
    assert observe_report(dead, reported, at=1.0, process_id=1, version=3).state is wanted


def test_a_verified_apply_names_its_version() -> None:
    with pytest.raises(ValueError, match="without its version"):
        observe(ReplicaHealth(), HealthEvent.VERIFIED, at=0.0)
