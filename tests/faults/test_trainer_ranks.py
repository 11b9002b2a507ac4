"""SIGKILL and SIGSTOP of a rank that is not the first, during a step and during a publish: the trainer raises and never
hangs, no version is half committed, and one made anew goes on from the newest step checkpoint.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup

from ostinato.infra.platform.cluster.placement import release_ranks, reserve_ranks
from ostinato.infra.platform.cluster.processes import is_alive
from ostinato.infra.platform.cluster.ranks import marked_ranks
from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import list_versions
from ostinato.infra.serving.weights.retrying_store import RetryingStore
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.actor import TrainerGroup
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.report import StepReport
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
    """The ranks among this process's descendants."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "RankActor" in command_line(child)]


def rank_pids() -> list[int]:
    return [rank.pid for rank in other_ranks()]


def step_after_signal(
    trainer: RLTrainer, samples: list[Sample], ending: signal.Signals
) -> StepReport:
    """The second rank ends before it computes its part."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), ending)
    return trainer.step(samples)


def publish_and_kill(trainer: RLTrainer, request: TrainerRequest) -> int:
    """The second rank is killed before any rank knows what to write, so its shard cannot lie there yet."""
    publisher = trainer._publisher._publisher
    [pid] = [m.pid for rank, m in marked_ranks(Path(request.work_directory)).items() if rank == 1]

    def kill_at_the_plan(operation: str, key: str) -> None:
        if operation == "put" and key.startswith(f"chains/{CHAIN}/00000002/plan."):
            os.kill(pid, signal.SIGKILL)

    if dist.get_rank() == 0:
        troubled = TroubledStore(open_store(request), kill_at_the_plan)
        publisher._objects = RetryingStore.around(troubled)
    return trainer.publish().version


def fail_on_the_second(trainer: RLTrainer) -> None:
    if dist.get_rank() == 1:
        raise KeyError("a reason of its own")
    dist.barrier()


def check_goes_on(request: TrainerRequest, room: PlacementGroup, version: int) -> None:
    """A trainer made anew, as a restart makes one, starts from step 1 and publishes above `version`."""
    batches = [batch(2)]
    store = open_store(request)
    trainer = TrainerGroup(request, store, room)
    try:
        assert trainer.status().step == 1
        trainer.step(batches[0])
        assert trainer.start_publish() > version
        saved = load_checkpoint(Path(trainer.save().checkpoint_directory)).weights
        newest = list_versions(store, CHAIN)[-1]
        assert same_bits(ChainSubscriber(store, CHAIN).fetch(newest), saved)
    finally:
        trainer.close()
    assert rank_pids() == []


def check_chain_is_whole(store: ObjectStore) -> int:
    versions = list_versions(store, CHAIN)
    for version in versions:
        ChainSubscriber(store, CHAIN).fetch(version)
    return versions[-1]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.nightly
def test_rank_ended_during_a_step_ends_the_trainer_which_goes_on_anew(
    tmp_path: Path, room: PlacementGroup, ending: signal.Signals
) -> None:
    request, batches = make_request(tmp_path), [batch(1), batch(2)]
    trainer = TrainerGroup(request, open_store(request), room, PATIENCE_SECONDS)
    pids = rank_pids()
    marks = marked_ranks(Path(request.work_directory))
    assert sorted(mark.pid for mark in marks.values()) == sorted(pids)
    trainer.step(batches[0])
    trainer.start_publish()
    trainer.save()
    with pytest.raises(ClusterError, match="the trainer of run, 2 ranks"):
        trainer._ranks.call(step_after_signal, batches[1], ending, limit_seconds=600.0)
    with pytest.raises(ClusterError, match="takes no more calls"):
        trainer.step(batches[1])
    assert not is_alive(marked_ranks(Path(request.work_directory))[1])
    trainer.close()
    assert marked_ranks(Path(request.work_directory)) == {}
    assert not any(map(is_running, pids))
    newest = check_chain_is_whole(open_store(request))
    check_goes_on(request, room, newest)


@pytest.mark.nightly
def test_rank_killed_during_a_publish_leaves_no_half_version(
    tmp_path: Path, room: PlacementGroup
) -> None:
    request, batches = make_request(tmp_path), [batch(1), batch(2)]
    plain = open_store(request)
    trainer = TrainerGroup(request, plain, room)
    trainer.step(batches[0])
    trainer.start_publish()
    trainer.save()
    trainer.step(batches[1])
    with pytest.raises(ClusterError, match="rank 1 was lost"):
        trainer._ranks.call(publish_and_kill, request, limit_seconds=600.0)
    with pytest.raises(ClusterError):
        trainer.step(batches[1])
    trainer.close()
    assert list_versions(plain, CHAIN) == [0, 1]
    assert check_chain_is_whole(plain) == 1
    check_goes_on(request, room, 1)


def test_rank_that_fails_is_named_with_its_reason(tmp_path: Path, room: PlacementGroup) -> None:
    request = make_request(tmp_path)
    trainer = TrainerGroup(request, open_store(request), room)
    with pytest.raises(ClusterError, match="rank 1 failed") as failed:
        trainer._ranks.call(fail_on_the_second, limit_seconds=600.0)
    assert "a reason of its own" in str(failed.value)
    assert rank_pids() == []
    trainer.close()


class Owner:
    """A process that has started a trainer."""

    def __init__(self, request: TrainerRequest, room: PlacementGroup) -> None:
        self._trainer = TrainerGroup(request, open_store(request), room)

    def pid(self) -> int:
        self._trainer.status()
        return os.getpid()


@pytest.mark.nightly
def test_ranks_end_with_their_owner(tmp_path: Path, room: PlacementGroup) -> None:
    """However it ends, Ray ends the actors that it started."""
    request = make_request(tmp_path)
    owner: Any = ray.remote(Owner).options(num_cpus=0)
    os.kill(ray.get(owner.remote(request, room).pid.remote(), timeout=600), signal.SIGKILL)
    marks = marked_ranks(Path(request.work_directory))
    wait_for_end(other_ranks, PATIENCE_SECONDS)
    assert len(marks) == 2
    assert not any(map(is_alive, marks.values()))
