"""A cycle's training that is killed takes its step once and forgets nothing that the gate asks for."""

import threading
from pathlib import Path

import pytest

from ostinato.infra.platform.objects import ObjectStore
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.tasks.realtime import cycle_training
from ostinato.tasks.realtime.parity_gate import parity_checks
from ostinato.tasks.realtime.records import CycleTrainingResult
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    PackingConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.unit.tasks.reinforcement.learning.samples import TINY, random_samples


class Killed(Exception):
    """Stands in for SIGKILL."""


def model() -> TrainerModel:
    return build_trainer_model(TINY, seed=3)


def take_step(place: Path) -> dict[str, float]:
    """One attempt at a step on samples that another policy drew, in a directory that stays."""
    start = place / "start"
    if not start.exists():
        save_checkpoint(start, TINY, model().export_weights())
    request = TrainerRequest(
        config=LearningConfig(packing=PackingConfig(bucket_tokens=(16, 40), microbatch_tokens=160)),
        checkpoint_directory=str(start),
        work_directory=str(place / "steps"),
        chain_id="chain-cycle",
    )
    samples = random_samples(build_trainer_model(TINY, seed=4), 6, seed=0)
    objects = ObjectStore.from_url(f"file://{place}/objects")
    return cycle_training.take_step(request, objects, samples, place / "made", {})


def alarms(metrics: dict[str, float]) -> list[str]:
    result = CycleTrainingResult(
        checkpoint_directory="",
        interactions=1,
        skipped=0,
        samples=1,
        mean_reward=0.0,
        metrics=metrics,
    )
    return [check.detail for check in parity_checks(result) if not check.passed]


@pytest.mark.parametrize(
    ("owner", "call"),
    [
        (RLTrainer, "save"),
        (RLTrainer, "publish"),
        (RLTrainer, "export"),
    ],
)
def test_parity_alarm_outlives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, call: str
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(owner, call, die)
        with pytest.raises(Killed):
            take_step(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publish")]
    metrics = take_step(tmp_path)
    [alarm] = alarms(metrics)
    assert f"k3 {metrics['parity_one_cache_k3_nats']:.3g}" in alarm
    assert "limit 1e-06" in alarm


def test_k3_that_is_no_number_is_an_alarm() -> None:
    measured = {"parity_one_cache_tokens": 10, "parity_alarm_k3": 1e-6}
    assert "k3 nan" in alarms(measured)[0]
    assert not alarms(measured | {"parity_one_cache_k3_nats": 1e-9})
    assert not alarms({})
