"""Real replica processes that freeze, die in an update and come back; the fleet grows and shrinks around them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.actors import end_actor
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.infra.serving.engine.health import ReplicaState
from ostinato.infra.serving.engine.replica import start_replicas
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.decode.engine import EngineConfig
from tests.fakes.tiny_model import TINY, random_weights, tiny_request

pytest_plugins = ["tests.fakes.ray_here"]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.asyncio,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_here"),
]


async def reach(fleet: EngineFleet, name: str, state: ReplicaState) -> None:
    """Refreshes until the replica is there; the test's own time limit ends what never is."""
    while fleet.states()[name] is not state:
        await fleet.refresh_states()


@pytest.mark.nightly
async def test_replicas_that_freeze_die_join_and_leave(tmp_path: Path) -> None:
    chain = (ObjectStore.from_url(f"file://{tmp_path}/objects"), "c")
    publisher = ChainPublisher(*chain)
    publisher.publish(0, random_weights(TINY))
    actors = start_replicas(TINY, EngineConfig(slots=4), ["a", "b"], num_cpus=0.1, chain=chain)
    fleet = EngineFleet(actors, probe_seconds=6.0)  # a busy machine is no silence
    await fleet.follow(*chain)
    pids = {name: int(told["process_id"]) for name, told in (await fleet.health()).items()}

    os.kill(pids["a"], signal.SIGSTOP)
    with pytest.raises(EngineError, match="replica a is silent"):
        await fleet.statistics()
    assert fleet.states() == {"a": ReplicaState.SUSPECT, "b": ReplicaState.SERVING}
    standing = fleet.replica_status()
    assert (standing["a"].state, standing["b"].state) == ("suspect", "serving")
    assert standing["a"].since > standing["b"].since
    assert "statistics was not answered" in standing["a"].reason
    for index in range(5):
        await fleet.generate(tiny_request(index))
    os.kill(pids["a"], signal.SIGCONT)
    await reach(fleet, "a", ReplicaState.SERVING)

    publisher.publish(1, random_weights(TINY, seed=1))
    updating = asyncio.create_task(fleet.update_to(1))
    os.kill(pids["b"], signal.SIGKILL)
    await asyncio.gather(updating, return_exceptions=True)
    await reach(fleet, "b", ReplicaState.SERVING)
    assert (await fleet.health())["b"]["version"] == 1
    await fleet.update_to(1)

    await fleet.close()
    for actor in actors.values():
        end_actor(actor)
