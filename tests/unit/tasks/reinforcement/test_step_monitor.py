"""A trainer whose engine serves other weights than it says: the ledger is told, step by step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.decode.config import DecodingConfig, Precision
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.grading.cheating.alarms import HackMonitor
from ostinato.tasks.grading.config import MonitorConfig, Pattern
from ostinato.tasks.records import Group, RewardReport, Sample
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    RouterReplayConfig,
    TrainerRequest,
    trainer_config,
)
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from ostinato.tasks.reinforcement.step_monitor import StepMonitor, describe_parity
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory
from tests.fakes.sampled_groups import sample_answers
from tests.fakes.small_spec import SMALL_SPEC as TINY

NOW = 12.5
SERVED_SEED, OTHER_SEED = 3, 4


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    yield ledger
    ledger.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[RLTrainer]:
    trainer = open_trainer(tmp_path, DecodingConfig())
    yield trainer
    trainer.close()


def open_trainer(tmp_path: Path, decoding: DecodingConfig) -> RLTrainer:
    """A trainer beside such engines."""
    weights = build_trainer_model(TINY, seed=SERVED_SEED).export_weights()
    learning = LearningConfig(
        objective=ObjectiveConfig(loss_divisor_tokens=64),
        packing=PackingConfig(bucket_tokens=(16, 40), microbatch_tokens=160),
        router_replay=RouterReplayConfig(compared_tokens=1),
    )
    request = TrainerRequest(
        config=trainer_config(learning, decoding),
        checkpoint_directory=str(save_checkpoint(tmp_path / "start", TINY, weights)),
        work_directory=str(tmp_path / "work"),
        chain_id="run",
    )
    return RLTrainer(
        request, ObjectStore.from_url(f"file://{Path(request.work_directory).parent}/objects")
    )


def engine_samples(seed: int, precision: Precision = Precision.FP32) -> list[Sample]:
    """Answers of a real engine that says its weights, those of `seed`, are version 0."""
    weights = build_trainer_model(TINY, seed=seed).export_weights()
    prepared = prepare_weights(TINY, weights, 0, precision)
    engine = DecodeEngine(TINY, prepared, EngineConfig(slots=8))
    return sample_answers(engine, [[1, 2, 3 + index] for index in range(8)], new_tokens=16)


@pytest.fixture
def watch(ledger: Ledger) -> StepMonitor:
    return StepMonitor(
        "run",
        ledger.events,
        HackMonitor(MonitorConfig(window_trajectories=4, least_trajectories=2)),
        lambda: NOW,
    )


def test_engine_with_other_weights_is_an_event_and_an_honest_one_is_not(
    ledger: Ledger, trainer: RLTrainer, watch: StepMonitor
) -> None:
    honest = trainer.step(engine_samples(SERVED_SEED))
    watch.observe([], honest)
    assert honest.parity.one_cache is not None
    assert honest.parity.one_cache.tokens > 100
    assert ledger.events.recent("run") == []
    assert watch.alarms() == []


def test_parity_alarm_tells_the_ledger_what_the_trainer_measured(
    ledger: Ledger, trainer: RLTrainer, watch: StepMonitor
) -> None:
    wrong = trainer.step(engine_samples(OTHER_SEED))
    watch.observe([], wrong)
    told, replayed = wrong.mismatch_without_replay, wrong.parity.one_cache
    assert told is not None
    assert replayed is not None
    (event,) = ledger.events.recent("run")
    assert (event.name, event.at) == ("parity_alarm", NOW)
    assert event.payload == {
        "step": 1,
        "cache": "one",
        "k1": replayed.k1_nats,
        "k3": replayed.k3_nats,
        "p99_ratio": replayed.p99_ratio,
        "tokens": replayed.tokens,
        "alarm_k3": 1e-6,
        "k3_without_replay": told.k3_nats,
    }
    assert watch.alarms()[0].startswith(f"parity k3 {replayed.k3_nats:.3g} (limit 1e-06) of ")


def test_engine_in_bf16_is_no_alarm_but_one_with_other_weights_is(
    ledger: Ledger, tmp_path: Path, watch: StepMonitor
) -> None:
    decoding = DecodingConfig(precision=Precision.BF16)
    trainer = open_trainer(tmp_path, decoding)
    honest = trainer.step(engine_samples(SERVED_SEED, Precision.BF16))
    watch.observe([], honest)
    assert honest.parity.one_cache is not None
    # rounding of the weights is seen, and alone is no alarm
    assert 1e-8 < honest.parity.one_cache.k3_nats < honest.parity.alarm_k3
    assert watch.alarms() == []
    watch.observe([], trainer.step(engine_samples(OTHER_SEED, Precision.BF16)))
    (event,) = ledger.events.recent("run")
    assert event.payload["alarm_k3"] == honest.parity.alarm_k3
    trainer.close()


def test_an_engine_that_stays_wrong_alarms_also_when_all_its_tokens_are_old(
    ledger: Ledger, trainer: RLTrainer, watch: StepMonitor
) -> None:
    trainer.step(engine_samples(SERVED_SEED))
    trainer.publish()
    assert trainer.weight_version == 1
    # every token of the next steps is of version 0, whose weights the trainer still knows
    old = trainer.step(engine_samples(SERVED_SEED))
    watch.observe([], old)
    assert list(old.parity.tokens_by_age) == [1]
    assert watch.alarms() == []
    watch.observe([], trainer.step(engine_samples(OTHER_SEED)))
    assert len(watch.alarms()) == len(ledger.events.recent("run")) == 1


def test_steps_without_a_comparable_token_are_told(
    ledger: Ledger, trainer: RLTrainer, watch: StepMonitor
) -> None:
    samples = engine_samples(SERVED_SEED)
    for _ in range(3):
        trainer.step(samples)
        trainer.publish()
    for _ in range(3):
        assert watch.alarms() == []
        report = trainer.step(samples)
        assert describe_parity(report.parity) == "parity not measured"
        watch.observe([], report)
    assert watch.alarms() == ["parity was not measured in the last 3 steps"]


def test_hack_alarm_is_an_event_when_it_begins(
    ledger: Ledger, trainer: RLTrainer, watch: StepMonitor
) -> None:
    report: StepReport = trainer.step(engine_samples(SERVED_SEED))
    flags = {Pattern.ODD_PATH.value: "seen"}
    members = tuple(
        make_trajectory(
            AttemptRequest(f"t{index}", "g", make_problem("p"), index, 0, 1)
        ).model_copy(update={"reward": RewardReport(total=0.0, terms={}, flags=flags)})
        for index in range(2)
    )
    group = Group(group_id="g", problem_id="p", trajectories=members)
    watch.observe([group], report)
    watch.observe([group], report)
    (event,) = ledger.events.recent("run")
    assert (event.name, event.payload["step"]) == ("hack_alarm", 1)
    assert event.payload["name"] == Pattern.ODD_PATH.value
    assert watch.alarms()[0].startswith("odd_path 1.000")
