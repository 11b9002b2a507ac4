"""Replay: recorded steps come out bit for bit, and the first step that was computed otherwise is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.workspace import (
    METRICS,
    REQUEST,
    RequestEnvelope,
    Workspace,
)
from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import MetricsLog
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.records import Group
from ostinato.tasks.reinforcement import replay
from ostinato.tasks.reinforcement.learning.batches.credit import samples_of_step
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    PolicyOptimizerConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReplayRequest
from ostinato.tasks.reinforcement.replay import bisect, main
from ostinato.tasks.reinforcement.step_metrics import describe_groups
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory
from tests.unit.tasks.reinforcement.learning.samples import TINY

STEPS = 13
BAD_FROM = 11
CLI = (sys.executable, "-c", "from ostinato.flows.cli import main; main()")
DRAFTED = TINY.model_copy(update={"mtp_depth": 2, "mtp_hidden_size": 8})
LEARNING = LearningConfig(
    optimizer=PolicyOptimizerConfig(kind="adamw", learning_rate=1e-2),
    objective=ObjectiveConfig(
        loss_divisor_tokens=16, kl_coefficient=0.01, kl_refresh_steps=2, skip_zero_advantage=False
    ),
    packing=PackingConfig(bucket_tokens=(16,), microbatch_tokens=64),
    trains_drafts=True,
    keep_for_replay=True,
)


def make_group(run_id: str, number: int) -> Group:
    """Two attempts, of which the first solved."""
    problem = make_problem(f"p{number}")
    requests = [
        AttemptRequest(
            f"{run_id}.g{number}.{index}",
            f"{run_id}.g{number}",
            problem,
            index,
            retry=0,
            seed=index,
        )
        for index in range(2)
    ]
    return Group(
        group_id=requests[0].group_id,
        problem_id=problem.problem_id,
        trajectories=tuple(
            make_trajectory(request, versions=[0] * (2 + number % 3 + 2 * index), solved=not index)
            for index, request in enumerate(requests)
        ),
    )


def record(run_id: str, directory: Path, settings: Settings, bad_from: int) -> ReplayRequest:
    """Trains two groups per step; from `bad_from` on with the sign of the advantages turned."""
    start = save_checkpoint(
        directory / "start", DRAFTED, build_trainer_model(DRAFTED, seed=3).export_weights()
    )
    run = ReinforcementRequest(
        run_id=run_id, checkpoint_directory=str(start), problems_directory="", learning=LEARNING
    )
    trainer = RLTrainer(
        TrainerRequest(
            config=LEARNING,
            checkpoint_directory=str(start),
            work_directory=str(directory / "steps"),
            chain_id=f"chain-{run_id}",
        ),
        ObjectStore.from_url(f"file://{directory}/chain"),
    )
    rows = open_ledger(settings).journal
    journal = RolloutJournal(rows, open_object_store(settings), run_id)
    metrics = MetricsLog(directory / METRICS)
    for step in range(1, STEPS + 1):
        groups = [make_group(run_id, 2 * step), make_group(run_id, 2 * step + 1)]
        for group in groups:
            members = group.trajectories
            problem = make_problem(group.problem_id)
            journal.reserve(
                [
                    AttemptRequest(member.trajectory_id, group.group_id, problem, 0, 0, 0)
                    for member in members
                ],
                0,
            )
            journal.commit(group)
        journal.mark_trained([group.group_id for group in groups], step)
        samples = samples_of_step(reversed(groups), LEARNING.objective)
        if step >= bad_from:
            samples = [
                sample.model_copy(update={"advantage": -sample.advantage}) for sample in samples
            ]
        report = trainer.step(samples)
        metrics.append(step, {**report.metrics(), **describe_groups(groups)})  # as a run does
        trainer.save()
    trainer.close()
    envelope = RequestEnvelope(
        entry="ostinato.tasks.reinforcement.run:main",
        fingerprint="",
        request=run.model_dump(mode="json"),
    )
    (directory / REQUEST).write_text(envelope.model_dump_json())
    return ReplayRequest(run=run, run_directory=str(directory), steps=tuple(range(1, STEPS + 1)))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> ReplayRequest:
    return record("sound", tmp_path_factory.mktemp("sound"), settings, STEPS + 1)


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> ReplayRequest:
    return record("turned", tmp_path_factory.mktemp("turned"), settings, BAD_FROM)


def test_every_step_of_a_sound_run_leads_to_the_recorded_bits(
    sound: ReplayRequest, settings: Settings, tmp_path: Path
) -> None:
    report = main(sound, Workspace.open(tmp_path, settings))
    assert [found.step for found in report.steps] == list(sound.steps)
    assert [(found.different_tensors, found.different_metrics) for found in report.steps] == (
        [(0, {})] * STEPS
    )
    assert report.first_different is None
    assert bisect(sound, Workspace.open(tmp_path, settings)).first_different is None


@pytest.mark.parametrize("metric", ["weights", "loss"])
@pytest.mark.nightly
def test_bisect_finds_the_first_step_with_the_wrong_sign(
    turned: ReplayRequest, settings: Settings, tmp_path: Path, metric: str
) -> None:
    asked = turned.model_copy(update={"metric": metric})
    report = bisect(asked, Workspace.open(tmp_path, settings))
    assert report.first_different == BAD_FROM
    assert len(report.steps) <= 4
    assert all(found.is_equal == (found.step < BAD_FROM) for found in report.steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "is_turned", "says", "code"),
    [
        ("replay", False, f"{STEPS} steps, all equal in weights", 0),
        ("bisect", True, f"first step that differs in weights: {BAD_FROM}", 1),
    ],
)
@pytest.mark.nightly
def test_commands_repeat_all_steps_and_find_the_one_where_the_sign_turned(
    request: pytest.FixtureRequest,
    settings: Settings,
    command: str,
    is_turned: bool,
    says: str,
    code: int,
) -> None:
    run: ReplayRequest = request.getfixturevalue("turned" if is_turned else "sound")
    asked = subprocess.run(
        [*CLI, command, "--run", run.run_directory],
        env=os.environ | {"OSTINATO_HOME": str(settings.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert says in asked.stderr, asked.stderr
    assert asked.returncode == code


def test_the_demo_keeps_what_replay_needs_and_recipes_of_large_models_do_not() -> None:
    kept = {
        name: load_recipe(name).learning.keep_for_replay
        for name in ("nano", "miniature", "nano_long", "problems_16", "smollm2_quick")
    }
    assert kept == dict.fromkeys(kept, False) | {"nano": True, "miniature": True}


def test_a_step_that_was_not_kept_names_the_setting(
    sound: ReplayRequest, settings: Settings, tmp_path: Path
) -> None:
    asked = sound.model_copy(update={"steps": (STEPS + 1,)})
    with pytest.raises(StorageError, match=r"learning\.keep_for_replay=true"):
        main(asked, Workspace.open(tmp_path, settings))


def test_an_unknown_metric_names_those_there_are(
    sound: ReplayRequest, settings: Settings, tmp_path: Path
) -> None:
    asked = sound.model_copy(update={"metric": "lost"})
    with pytest.raises(ConfigError, match=r"'lost' at step 1, wanted weights, .*loss"):
        main(asked, Workspace.open(tmp_path, settings))


def test_steps_of_another_processor_are_refused(
    sound: ReplayRequest, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "describe_machine", lambda _: "another processor")
    with pytest.raises(ConfigError, match="not comparable, it was computed on"):
        main(sound, Workspace.open(tmp_path, settings))
