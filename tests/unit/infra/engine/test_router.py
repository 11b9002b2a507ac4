"""Routing laws: affinity, balance, stealing, states."""

import pytest

from infra.engine.router import RequestRouter
from infra.engine.states import ReplicaState
from infra.errors import EngineError


def test_a_session_stays_where_its_cache_is() -> None:
    router = RequestRouter(["a", "b"])
    home = router.choose("session", 100)
    router.finish(home, 100)
    router.choose("other", 50)
    assert router.choose("session", 100) == home


def test_new_sessions_go_to_the_least_outstanding_tokens() -> None:
    router = RequestRouter(["a", "b"])
    first = router.choose("one", 500)
    second = router.choose("two", 100)
    assert first != second
    assert router.choose("three", 100) == second


def test_a_session_moves_when_its_home_is_far_busier() -> None:
    router = RequestRouter(["a", "b"], steal_margin_tokens=1000)
    home = router.choose("session", 10)
    router.finish(home, 10)
    assert router.choose("session", 900) == home
    assert router.choose("session", 200) == home
    assert router.choose("session", 10) != home


def test_a_dead_replica_gets_nothing_and_no_replica_is_an_error() -> None:
    router = RequestRouter(["a", "b"])
    home = router.choose("session", 10)
    router.set_state(home, ReplicaState.DEAD)
    assert router.choose("session", 10) != home
    for name in ("a", "b"):
        router.set_state(name, ReplicaState.STALE)
    with pytest.raises(EngineError, match="a stale"):
        router.choose("session", 10)


def test_every_choice_is_taken_back() -> None:
    router = RequestRouter(["a", "b", "c"])
    chosen = [router.choose(f"session-{index}", index) for index in range(30)]
    for index, name in enumerate(chosen):
        router.finish(name, index)
    assert set(router.outstanding_requests().values()) == {0}
