"""SIGKILL and SIGSTOP of a rank that is not the first, during a step and during a publish: the trainer raises and never
hangs, no version is half committed, and one made anew goes on from the newest step checkpoint.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import PlacementGroup

from ostinato.infra.platform.cluster.placement import rank_options, release_ranks, reserve_ranks
from ostinato.infra.platform.cluster.processes import is_alive
from ostinato.infra.platform.cluster.ranks import marked_ranks
from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
from ostinato.infra.platform.errors import ClusterError, StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import list_versions
from ostinato.infra.serving.weights.retrying_store import RetryingStore
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.actor import TrainerActor
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.ranks.rank import OtherRank
from ostinato.tasks.reinforcement.learning.ranks.share import ShareResult, ShareWork, StepShare
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.fakes.processes import command_line, is_running, wait_for_end
from tests.faults.weight_chain_programs import TroubledStore
from tests.unit.infra.serving.weights.strategies import same_bits
from tests.unit.tasks.reinforcement.learning.samples import TINY, random_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHAIN = "run"
PATIENCE_SECONDS = 20.0


def make_request(directory: Path) -> TrainerRequest:
    model = build_trainer_model(TINY, seed=3)
    start = save_checkpoint(directory / "start", TINY, model.export_weights())
    return TrainerRequest(
        config=LearningConfig(
            world_size=2,
            objective=ObjectiveConfig(loss_divisor_tokens=64),
            packing=PackingConfig(bucket_tokens=(16, 40), microbatch_tokens=80),
        ),
        checkpoint_directory=str(start),
        work_directory=str(directory / "work"),
        chain_id=CHAIN,
    )


def batch(seed: int) -> list[Sample]:
    return random_samples(build_trainer_model(TINY, seed=3), 9, seed=seed)


def open_store(request: TrainerRequest) -> ObjectStore:
    return ObjectStore.from_url(f"file://{Path(request.work_directory).parent}/objects")


@pytest.fixture
def room() -> Iterator[PlacementGroup]:
    """Of two ranks, on a Ray of its own."""
    start_ray(num_cpus=2, object_store_bytes=100 * 2**20)
    room = reserve_ranks(2, "cpu")
    yield room
    release_ranks(room)
    stop_ray()


def other_ranks() -> list[psutil.Process]:
    """Those among this process's descendants."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "RankActor" in command_line(child)]


def rank_pids() -> list[int]:
    return [rank.pid for rank in other_ranks()]


class WorkAfterSignal:
    """Sends another process a signal before it computes its share of a step."""

    def __init__(self, work: ShareWork, pid: int, ending: signal.Signals) -> None:
        self._work, self._pid, self._ending = work, pid, ending

    def run(self, share: StepShare) -> ShareResult:
        os.kill(self._pid, self._ending)
        return self._work.run(share)


def check_goes_on(request: TrainerRequest, room: PlacementGroup, version: int) -> None:
    """A trainer made anew, as a restart makes one, starts from step 1 and publishes above `version`."""
    batches = [batch(2)]
    store = open_store(request)
    trainer = RLTrainer(request, store, room)
    try:
        assert trainer.step == 1
        trainer.train_step(batches[0])
        assert trainer.publish().version > version
        newest = list_versions(store, CHAIN)[-1]
        assert same_bits(ChainSubscriber(store, CHAIN).fetch(newest), trainer.export_weights())
    finally:
        trainer.close()
    assert rank_pids() == []


def check_chain_is_whole(store: ObjectStore) -> int:
    versions = list_versions(store, CHAIN)
    for version in versions:
        ChainSubscriber(store, CHAIN).fetch(version)
    return versions[-1]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_ended_during_a_step_ends_the_trainer_which_goes_on_anew(
    tmp_path: Path, room: PlacementGroup, ending: signal.Signals
) -> None:
    request, batches = make_request(tmp_path), [batch(1), batch(2)]
    trainer = RLTrainer(request, open_store(request), room, PATIENCE_SECONDS)
    [pid] = rank_pids()
    marks = marked_ranks(Path(request.work_directory))
    assert {rank: mark.pid for rank, mark in marks.items()} == {0: os.getpid(), 1: pid}
    trainer.train_step(batches[0])
    trainer.publish()
    trainer.save()
    trainer._own._work = WorkAfterSignal(trainer._own._work, pid, ending)  # type: ignore[assignment]
    with pytest.raises(ClusterError, match="the trainer of run, 2 ranks"):
        trainer.train_step(batches[1])
    with pytest.raises(ClusterError, match="takes no orders any more"):
        trainer.train_step(batches[1])
    assert not is_alive(marked_ranks(Path(request.work_directory))[1])
    trainer.close()
    assert marked_ranks(Path(request.work_directory)) == {}
    assert not is_running(pid)
    newest = check_chain_is_whole(open_store(request))
    check_goes_on(request, room, newest)


def test_rank_killed_during_a_publish_leaves_no_half_version(
    tmp_path: Path, room: PlacementGroup
) -> None:
    request, batches = make_request(tmp_path), [batch(1), batch(2)]
    plain = open_store(request)
    pids: list[int] = []

    def kill_at_the_plan_of_version_2(operation: str, key: str) -> None:
        """Before any rank knows what to write, so the other one's shard cannot lie there yet."""
        if operation == "put" and key.startswith(f"chains/{CHAIN}/00000002/plan."):
            os.kill(pids[0], signal.SIGKILL)

    actor = ActorWithStore(request, plain, room, kill_at_the_plan_of_version_2)
    pids.extend(rank_pids())
    actor.advance(batches[0])
    with pytest.raises((ClusterError, StorageError), match="trainer of run"):
        actor.advance(batches[1], save=False)
    with pytest.raises(ClusterError):
        actor.advance(batches[1])
    with contextlib.suppress(ClusterError):  # why the upload ended, unless advance told it already
        actor.close()
    assert list_versions(plain, CHAIN) == [0, 1]
    assert check_chain_is_whole(plain) == 1
    check_goes_on(request, room, 1)


class ActorWithStore(TrainerActor):
    """The actor, whose own publisher meets `before` at each operation."""

    def __init__(
        self,
        request: TrainerRequest,
        store: ObjectStore,
        room: PlacementGroup,
        before: Callable[[str, str], None],
    ) -> None:
        super().__init__(request, store, room)
        publisher = self._trainer._publisher
        publisher._objects = RetryingStore.around(TroubledStore(store, before))


def test_rank_that_fails_is_named_with_its_reason(tmp_path: Path, room: PlacementGroup) -> None:
    request = make_request(tmp_path)
    trainer = RLTrainer(request, open_store(request), room)
    with pytest.raises(ClusterError, match="rank 1 failed") as failed:
        trainer._ranks.run_beside(OtherRank.score_reference, [], lambda: None)
    assert "there is no KL reference to score" in str(failed.value)
    assert rank_pids() == []
    trainer.close()


def test_ranks_end_with_the_first_one(tmp_path: Path, room: PlacementGroup) -> None:
    """However rank 0 ends, Ray ends the actors that it started."""
    request = make_request(tmp_path)
    first: Any = ray.remote(TrainerActor).options(**rank_options(room, 0))
    trainer = first.remote(request, open_store(request), room)
    ray.get(trainer.status.remote(), timeout=600)
    marks = marked_ranks(Path(request.work_directory))
    os.kill(marks[0].pid, signal.SIGKILL)
    wait_for_end(other_ranks, PATIENCE_SECONDS)
    assert not is_alive(marks[1])
