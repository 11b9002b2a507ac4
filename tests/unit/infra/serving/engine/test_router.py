"""Routing laws: affinity, balance, stealing, states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.engine.health import ReplicaState
from ostinato.infra.serving.engine.router import RequestRouter


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
    assert set(router.outstanding_tokens().values()) == {0}


operations = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), st.integers(0, 9), st.integers(1, 5000)),
        st.tuples(st.just("finish"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("state"), st.integers(0, 4), st.sampled_from(list(ReplicaState))),
    ),
    max_size=120,
)


@given(operations, st.integers(0, 6000))
def test_any_history_new_sessions_go_to_the_least_busy_and_old_ones_move_only_for_a_reason(
    history, margin: int
) -> None:
    names = [f"r{index}" for index in range(5)]
    router = RequestRouter(names, steal_margin_tokens=margin)
    under_way: list[tuple[str, int]] = []
    homes: dict[str, str] = {}
    for kind, number, value in history:
        serving = [n for n, s in router.states().items() if s is ReplicaState.SERVING]
        loads = router.outstanding_tokens()
        if kind == "state":
            router.set_state(names[number], value)
        elif kind == "finish" and under_way:
            router.finish(*under_way.pop(number % len(under_way)))
        elif kind == "choose" and serving:
            session = f"s{number}"
            chosen = router.choose(session, value)
            least = min(loads[name] for name in serving)
            assert chosen in serving
            home = homes.get(session)
            if home in serving and loads[home] - least <= margin:
                assert chosen == home
            else:
                assert loads[chosen] == least
            homes[session] = chosen
            under_way.append((chosen, value))
    for name, tokens in under_way:
        router.finish(name, tokens)
    assert set(router.outstanding_tokens().values()) == {0}
