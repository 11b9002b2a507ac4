"""Named actors on a real Ray: found again by name, their errors typed, their death told."""

import os

import pytest

from ostinato.infra.platform.cluster.actors import (
    end_actor,
    find_actor,
    get_or_create_actor,
    is_actor_alive,
    wait_for,
)
from ostinato.infra.platform.errors import ClusterError, EngineError

pytest_plugins = ["tests.fakes.ray_here"]


class Counter:
    """Counts, fails typed, dies."""

    def __init__(self, first: int) -> None:
        self._value = first

    def add(self) -> int:
        self._value += 1
        return self._value

    def fail(self) -> None:
        raise EngineError("replica 3 is gone")

    def die(self) -> None:
        os._exit(1)


def test_actor_without_ray_is_refused_instead_of_starting_one() -> None:
    with pytest.raises(ClusterError, match="actor early needs Ray"):
        get_or_create_actor(Counter, "early", 0)
    with pytest.raises(ClusterError, match="actor early needs Ray"):
        find_actor("early")


@pytest.mark.usefixtures("ray_here")
def test_second_call_with_the_name_finds_the_first_actor() -> None:
    first = get_or_create_actor(Counter, "counter", 10)
    again = get_or_create_actor(Counter, "counter", 99)

    assert wait_for(first.add.remote(), "add", 60) == 11
    assert wait_for(again.add.remote(), "add", 60) == 12
    end_actor(first)
    assert not is_actor_alive(first)
    assert find_actor("counter") is None


@pytest.mark.usefixtures("ray_here")
def test_actors_that_were_ended_answer_no_more() -> None:
    actors = [get_or_create_actor(Counter, f"ended-{n}", n) for n in range(6)]
    for n, actor in enumerate(actors):
        assert wait_for(actor.add.remote(), "add", 180) == n + 1
        end_actor(actor)
        assert not is_actor_alive(actor)


@pytest.mark.usefixtures("ray_here")
def test_typed_error_of_an_actor_arrives_as_itself() -> None:
    actor = get_or_create_actor(Counter, "failing", 0)
    with pytest.raises(EngineError, match="replica 3 is gone") as caught:
        wait_for(actor.fail.remote(), "fail", 60)

    assert type(caught.value) is EngineError
    end_actor(actor)


@pytest.mark.usefixtures("ray_here")
def test_death_is_a_cluster_error_and_a_restarted_actor_begins_anew() -> None:
    actor = get_or_create_actor(Counter, "mortal", 5, max_restarts=1)
    assert wait_for(actor.add.remote(), "add", 60) == 6
    with pytest.raises(ClusterError, match="die failed"):
        wait_for(actor.die.remote(), "die", 60)

    assert is_actor_alive(actor, timeout_seconds=60)
    assert wait_for(actor.add.remote(), "add", 60) == 6
    end_actor(actor)
