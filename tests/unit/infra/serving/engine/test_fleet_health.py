"""A fleet's health, growth and waiting room, over replicas in this process (no Ray: handles call directly)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.infra.serving.engine.health import HealthEvent, ReplicaState
from ostinato.infra.serving.engine.replica import EngineReplica
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Priority
from tests.fakes.tiny_model import TINY, random_weights

pytestmark = pytest.mark.asyncio


class LocalActor:
    """An actor handle over a replica in this loop, whose process can be frozen, killed and started again."""

    def __init__(self, name: str, chain: tuple[ObjectStore, str] | None = None) -> None:
        self.name = name
        self._chain = chain
        self.is_frozen = False
        self.is_dead = False
        self.start()

    def start(self) -> None:
        self.replica = EngineReplica(self.name, TINY, EngineConfig(slots=4), self._chain)
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            @staticmethod
            def remote(*arguments: object) -> "asyncio.Future[Any]":
                method: Callable[..., Awaitable[Any]] = getattr(actor.replica, name)
                return asyncio.ensure_future(actor.call(method, *arguments))

        return Method

    async def call(self, method: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        while self.is_frozen:
            await asyncio.sleep(0.005)
        if self.is_dead:
            raise ActorDiedError
        return await method(*arguments)


def request(index: int, tokens: int = 10, priority: Priority = Priority.TRAINING):
    return GenerateRequest(
        f"r{index}", f"s{index}", (1, 2, index % 32), tokens, (), seed=index, priority=priority
    )


@pytest.fixture
def chain(tmp_path: Path) -> tuple[ObjectStore, str]:
    objects = ObjectStore.from_url(f"file://{tmp_path}/objects")
    ChainPublisher(objects, "c").publish(0, random_weights(TINY))
    return objects, "c"


def make_fleet(
    chain: tuple[ObjectStore, str], names: str = "ab", **options: Any
) -> tuple[EngineFleet, dict[str, LocalActor]]:
    actors = {name: LocalActor(name, chain) for name in names}
    return EngineFleet(actors, **options), actors  # type: ignore[arg-type]


async def test_a_silent_replica_is_suspected_then_dead_then_back(chain) -> None:
    fleet, actors = make_fleet(chain)
    await fleet.follow(*chain)
    actors["a"].is_frozen = True
    fleet._probe_seconds = 1.0  # enough for `b` on a busy machine
    with pytest.raises(EngineError, match="replica a is silent"):
        await fleet.statistics()
    assert fleet.states() == {"a": ReplicaState.SUSPECT, "b": ReplicaState.SERVING}
    fleet._probe_seconds = 0.2
    for index in range(4):
        await fleet.generate(request(index))
    while fleet.states()["a"] is ReplicaState.SUSPECT:
        await fleet.refresh_states()
    assert fleet.states()["a"] is ReplicaState.DEAD
    actors["a"].is_frozen = False
    while fleet.states()["a"] is not ReplicaState.SERVING:  # a busy machine may be slow to answer
        await fleet.refresh_states()
    await fleet.close()


async def test_a_suspect_that_answers_serves_again(chain) -> None:
    fleet, actors = make_fleet(chain, probe_seconds=0.2)
    await fleet.follow(*chain)
    actors["a"].is_frozen = True
    with pytest.raises(EngineError, match="silent"):
        await fleet.health()
    assert fleet.states()["a"] is ReplicaState.SUSPECT
    actors["a"].is_frozen = False
    fleet._probe_seconds = 30.0
    await fleet.health()
    assert fleet.states()["a"] is ReplicaState.SERVING
    assert fleet._health["a"].silences == 0
    await fleet.close()


async def test_a_silent_replica_holds_up_no_request_for_another(chain) -> None:
    fleet, actors = make_fleet(chain, probe_seconds=30.0)
    await fleet.follow(*chain)
    actors["a"].is_frozen = True
    fleet._observe("a", HealthEvent.LOST)
    answers = await asyncio.gather(*(fleet.generate(request(index)) for index in range(6)))
    assert len(answers) == 6  # while the question to `a` is still open
    assert fleet.states()["a"] is ReplicaState.DEAD
    actors["a"].is_frozen = False
    await fleet.close()


async def test_a_failed_question_is_told_to_one_caller_and_asked_again(chain, monkeypatch) -> None:
    async def fail() -> None:
        raise ValueError("no such chain")

    fleet, actors = make_fleet(chain)
    await fleet.follow(*chain)
    fleet._observe("a", HealthEvent.LOST)
    numbers = iter(range(10_000))

    async def ask_on() -> None:
        while True:
            await fleet.generate(request(next(numbers)))

    with monkeypatch.context() as broken:
        broken.setattr(actors["a"].replica, "recover", fail)
        with pytest.raises(ValueError, match="no such chain"):
            await ask_on()
    while fleet.states()["a"] is not ReplicaState.SERVING:
        await fleet.generate(request(next(numbers)))
    await fleet.close()


async def test_requests_of_a_replica_that_falls_silent_fail_and_others_go_on(chain) -> None:
    fleet, actors = make_fleet(chain)
    fleet._mailboxes["a"]._silence_seconds = 0.02
    await fleet.follow(*chain)
    actors["a"].is_frozen = True
    answers = await asyncio.gather(
        *(fleet.generate(request(index)) for index in range(6)), return_exceptions=True
    )
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert 0 < len(failed) < 6
    assert all(isinstance(f, EngineError) and "silent" in str(f) for f in failed)
    assert fleet.states()["a"] is ReplicaState.DEAD
    actors["a"].is_frozen = False
    await fleet.close()


async def test_trap_16_a_dead_replica_serves_again_only_with_the_newest_weights(chain) -> None:
    fleet, actors = make_fleet(chain, "a")
    await fleet.follow(*chain)
    actors["a"].is_dead = True
    with pytest.raises(EngineError, match="a is gone"):
        await fleet.generate(request(0))
    assert fleet._health["a"].version is None
    ChainPublisher(chain[0], chain[1]).publish(1, random_weights(TINY, seed=1))
    actors["a"].start()
    generation = await fleet.generate(request(1))
    assert set(generation.weight_versions_T.tolist()) == {1}
    assert fleet._health["a"].version == 1
    await fleet.close()


async def test_a_fleet_over_an_empty_chain_serves_nothing(tmp_path: Path) -> None:
    objects = ObjectStore.from_url(f"file://{tmp_path}/objects")
    fleet, _ = make_fleet((objects, "empty"), timeout_seconds=0.05)
    assert await fleet.follow(objects, "empty") == [None, None]
    with pytest.raises(EngineError, match="wanted one"):
        await fleet.generate(request(0))
    await fleet.close()
