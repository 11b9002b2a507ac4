"""A late cycle trains on fewer samples, the newest, and says so."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.realtime import cycle_training
from ostinato.tasks.realtime.config import CycleConfig, FeedbackConfig
from ostinato.tasks.realtime.cycle_training import TRAINING_STAGE, known_speed, newest_that_fit
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.distil import Distilled
from ostinato.tasks.realtime.feedback.interactions import Collection, Window
from ostinato.tasks.realtime.records import CycleTrainingRequest, CycleTrainingResult
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import LearningConfig, PackingConfig
from tests.unit.tasks.reinforcement.learning.samples import TINY, make_sample, random_samples

WINDOW = Window(
    line="mine",
    served="a@1",
    from_watermark=0,
    to_watermark=6,
    feedback_after=0.0,
    feedback_until=1.0,
)
LEARNING = LearningConfig(packing=PackingConfig(bucket_tokens=(16, 40), microbatch_tokens=40))


def ten_tokens(index: int, trajectory: str) -> Sample:
    sample = make_sample(index, [1] * 10, [False] + [True] * 9)
    return sample.model_copy(update={"trajectory_id": trajectory})


def test_newest_whole_interactions_stay() -> None:
    samples = [ten_tokens(0, "a"), ten_tokens(1, "b"), ten_tokens(2, "b"), ten_tokens(3, "c")]

    def left(tokens: float) -> list[str]:
        return [sample.sample_id for sample in newest_that_fit(samples, tokens)]

    assert left(40) == ["s0", "s1", "s2", "s3"]
    assert left(39) == ["s1", "s2", "s3"]
    assert left(29) == ["s3"]  # half of an interaction would be another reward
    assert left(0) == ["s3"]


def test_gate_needs_a_part_of_the_time_until_the_deadline() -> None:
    assert CycleConfig(deadline_seconds=100, gate_seconds=30).train_until(1_000.0) == 1_070.0
    assert CycleConfig(deadline_seconds=None).train_until(1_000.0) is None
    assert CycleConfig().deadline_seconds == 4 * 3_600  # before the next of every five hours
    with pytest.raises(ValidationError, match=r"gate_seconds is 100\.0, wanted less than"):
        CycleConfig(deadline_seconds=100, gate_seconds=100)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A cycle is open whose window holds six interactions."""
    samples = random_samples(build_trainer_model(TINY, seed=3), 6, seed=0)
    collection = Collection(window=WINDOW, interactions=(), skipped=())
    distilled = Distilled(
        samples=tuple(samples),
        rewards=(),
        baselines=Baselines(),
        mean_reward=0.0,
        mean_absolute_advantage=1.0,
    )
    monkeypatch.setattr(cycle_training, "collect", lambda *_: collection)
    monkeypatch.setattr(cycle_training, "distil", lambda *_: distilled)
    save_checkpoint(tmp_path / "start", TINY, build_trainer_model(TINY, seed=3).export_weights())
    settings = Settings(home=tmp_path)
    open_cycle(Ledger(settings.ledger_url).migrate(), "mine-1")
    directory = tmp_path / "training"
    directory.mkdir()
    return Workspace(directory, settings, ProgressWriter(directory))


def open_cycle(ledger: Ledger, name: str) -> None:
    ledger.cycles.open(name, line="mine", served="a@1", from_watermark=0, to_watermark=6, at=1.0)


def train(workspace: Workspace, now: float, name: str = "mine-1") -> CycleTrainingResult:
    """The training of a cycle that must end at 100."""
    request = CycleTrainingRequest(
        cycle_id=name,
        window=WINDOW,
        checkpoint_directory=str(workspace.directory.parent / "start"),
        feedback=FeedbackConfig(),
        learning=LEARNING,
        train_until=100.0,
    )
    return cycle_training.main(request, workspace, clock=lambda: now)


def test_cycle_without_a_known_speed_trains_on_all_until_it_is_late(workspace: Workspace) -> None:
    result = train(workspace, now=99.0)
    assert (result.samples, result.left_out) == (6, 0)


def test_late_cycle_trains_on_one_microbatch_and_says_so(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    result = train(workspace, now=101.0)
    assert 0 < result.samples < 6
    assert result.samples + result.left_out == 6
    assert result.checkpoint_directory is not None
    assert f"left_out={result.left_out}" in caplog.text
    # killed and begun again: what was trained stays
    assert train(workspace, now=0.0) == result


def test_speed_of_the_cycle_before_says_what_fits(workspace: Workspace) -> None:
    cycles = Ledger(workspace.settings.ledger_url).cycles
    cycles.update("mine-1", TRAINING_STAGE, {"tokens_per_second": 10.0})
    cycles.close("mine-1", "promoted", 2.0)
    open_cycle(Ledger(workspace.settings.ledger_url), "mine-2")
    assert train(workspace, now=92.0, name="mine-2").left_out > 0


def test_next_cycle_knows_the_speed_of_a_closed_one(workspace: Workspace) -> None:
    ledger = Ledger(workspace.settings.ledger_url)
    assert known_speed(ledger, "mine") is None
    result = train(workspace, now=0.0)
    assert known_speed(ledger, "mine") is None  # not closed
    ledger.cycles.close("mine-1", "promoted", 2.0)
    assert known_speed(ledger, "mine") == result.metrics["tokens_per_second"]
