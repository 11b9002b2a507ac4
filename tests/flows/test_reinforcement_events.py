"""What a real RL run tells the ledger while it trains: Ray, engine, boxes and trainer, three steps."""

from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.records import Split
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    ParityConfig,
    RouterReplayConfig,
)
from ostinato.tasks.reinforcement.records import (
    OnlineEvaluationConfig,
    ReinforcementRequest,
    ReinforcementResult,
)
from ostinato.tasks.rollout.config import CurriculumConfig, RolloutConfig, StalenessConfig
from tests.fakes.miniature import make_checkpoint, make_problem_set

STEPS = 3
BELOW_ROUNDING_K3 = 1e-30  # engine and trainer round differently: their k3 is some 1e-13


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_steps_above_the_alarm_level_are_parity_alarms_in_the_ledger(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    request = ReinforcementRequest(
        run_id="watched",
        checkpoint_directory=str(make_checkpoint(tmp_path / "start")),
        problems_directory=str(make_problem_set(tmp_path / "problems")),
        rollout=RolloutConfig(
            group_size=2,
            groups_per_step=1,
            concurrent_trajectories=4,
            least_spread=0.0,
            curriculum=CurriculumConfig(revisit_groups=1),
            staleness=StalenessConfig(update_interval_steps=STEPS),
        ),
        learning=LearningConfig(
            # rewards of random weights are all equal: such samples are computed too, and change the weights
            objective=ObjectiveConfig(
                skip_zero_advantage=False, entropy_floor_nats=100.0, entropy_coefficient=0.01
            ),
            parity=ParityConfig(alarm_k3=BELOW_ROUNDING_K3),
            router_replay=RouterReplayConfig(compared_tokens=1),
        ),
        harness=HarnessConfig(max_turns=2, max_generated_tokens=48, context_tokens=128),
        max_steps=STEPS,
        engine_slots=4,
        evaluation=OnlineEvaluationConfig(
            every_steps=1, problems=2, attempts_per_problem=1, split=Split.TRAIN
        ),
    )
    result = run_child(
        "ostinato.tasks.reinforcement.run:main",
        request,
        ReinforcementResult,
        directory=tmp_path / "run",
        settings=settings,
    )
    assert set(result.outcomes) <= {"finished", "truncated", "broken"}
    start, *later = result.evaluations
    assert (start.step, start.weight_version, start.reason) == (0, 0, "")
    assert [point.step for point in later] == [1, 2, 3]
    for point in later:  # as long as one evaluation takes, others are not begun
        assert (point.average is None) == point.reason.endswith("was still evaluated")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    alarming = {
        row["step"]: row
        for row in rows
        if float(row.get("parity_one_cache_k3_nats", 0)) > BELOW_ROUNDING_K3
    }
    assert len(rows) == STEPS
    assert [row["publish_lag"] for row in rows] == [0, 1, 2]  # engines keep the first version
    assert 1 in alarming  # the first step is sampled with the very weights it is taken at
    events = Ledger(settings.ledger_url).events.recent("watched")
    told = {event.payload["step"]: event for event in events if event.name == "parity_alarm"}
    assert sorted(told) == sorted(alarming)
    for step, event in told.items():
        row = alarming[step]
        assert event.payload["k3"] == row["parity_one_cache_k3_nats"]
        assert event.payload["k1"] == row["parity_one_cache_k1_nats"]
        assert event.payload["tokens"] == row["parity_one_cache_tokens"]
        assert event.payload["alarm_k3"] == BELOW_ROUNDING_K3
        assert event.payload["k3_without_replay"] == row.get("mismatch_without_replay_k3_nats")
        assert row["parity_alarms"] == 1
        assert event.payload["k3"] < 1e-6  # what is promised holds
