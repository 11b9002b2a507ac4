"""A cycle that is killed or has nothing to learn from: its window is trained once and the loop goes on."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from ostinato.flows.stages import realtime
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT
from ostinato.tasks.realtime.config import SimulatedUsersConfig
from ostinato.tasks.realtime.promotion.serving_line import PromotionOutcome
from tests.fakes import cycle_program
from tests.fakes.finished_stages import (
    add_checkpoint,
    add_problems,
    add_scorecard,
    open_context,
)
from tests.fakes.interactions import new_interaction

pytestmark = pytest.mark.usefixtures("prefect_server")
LINE = '[serving]\nline = "mine"\n[cycle]\ncanary = false\n[cycle.gate]\nfloor = 0.05\n'


def cycle_of(directory: Path) -> realtime.CycleReport:
    """One cycle with stand-ins for training and evaluation."""
    return cycle_program.run(directory, "", LINE)


def trainings(directory: Path) -> list[str]:
    """Windows that were trained, in order."""
    log = directory / "trainings.txt"
    return log.read_text().splitlines() if log.exists() else []


def interact(
    context: StageContext,
    count: int,
    first: int = 0,
    tenant: str = "people",
    served: str = "reinforced/mine@1",
) -> None:
    for number in range(first, first + count):
        done = new_interaction(f"i{number}", "mine", served)
        context.ledger.interactions.record(done.model_copy(update={"tenant": tenant}))


def begin(directory: Path) -> StageContext:
    context = open_context(directory, "mine", LINE)
    problems = add_problems(context, "a")
    trained = add_checkpoint(context, problems, "first")
    add_scorecard(context, problems, trained, 0.5)
    interact(context, 40)
    return context


@pytest.mark.parametrize(
    "moment",
    [
        "promotions.promote",  # by day: the training is done, the promotion is not
        "cycles.open",
        "artifacts.add",
        "cycles.update",
        "cycles.close",
        "after cycles.close",
    ],
)
@pytest.mark.sampled(1)
def test_sigkill_anywhere_in_a_cycle_trains_and_promotes_its_window_once(
    tmp_path: Path, home: Path, moment: str
) -> None:
    context = begin(tmp_path)
    # a process of its own: a fork of this one would have its locks without the threads that hold them
    program = [sys.executable, "-m", cycle_program.__name__, str(tmp_path), moment, LINE]
    server = {"PREFECT_API_URL": PREFECT_API_URL.value()}
    killed = subprocess.run(program, env=os.environ | server, check=False)
    assert killed.returncode == -signal.SIGKILL

    cycle_of(tmp_path)

    assert trainings(tmp_path) == ["0..40"]
    [cycle] = context.ledger.cycles.history("mine")
    assert (cycle.outcome, cycle.to_watermark) == ("promoted", 40)
    champions = [entry.checkpoint_id for entry in context.ledger.promotions.history("mine")]
    assert champions == ["reinforced/mine@1", "candidate/mine@1"]


def test_a_flow_run_that_starts_again_after_its_cycle_closed_opens_no_other(
    tmp_path: Path, home: Path
) -> None:
    context = begin(tmp_path)
    report = cycle_program.run(tmp_path, "", LINE, "run-1")
    assert report.candidate is not None
    interact(context, 30, first=40, served=report.candidate)  # enough for another cycle

    again = cycle_program.run(tmp_path, "", LINE, "run-1")

    assert (again.cycle_id, again.promotion) == (report.cycle_id, report.promotion)
    assert trainings(tmp_path) == ["0..40"]
    cycle_program.run(tmp_path, "", LINE, "run-2")
    assert trainings(tmp_path) == ["0..40", "40..70"]
    assert [row.flow_run_id for row in context.ledger.cycles.history("mine")] == ["run-1", "run-2"]


def test_window_without_samples_is_skipped_and_the_next_one_is_trained(
    tmp_path: Path, home: Path
) -> None:
    context = begin(tmp_path)
    (tmp_path / "nothing-to-learn").touch()
    report = cycle_of(tmp_path)
    assert (report.candidate, report.promotion) == (None, None)
    [cycle] = context.ledger.cycles.history("mine")
    assert cycle.outcome == "skipped"
    (tmp_path / "nothing-to-learn").unlink()
    interact(context, 30, first=40)

    assert cycle_of(tmp_path).candidate == "candidate/mine@1"

    assert trainings(tmp_path) == ["0..40", "40..70"]
    assert context.ledger.cycles.open_cycle("mine") is None


def test_candidate_of_a_trainer_that_disagrees_with_the_engine_is_refused(
    tmp_path: Path, home: Path
) -> None:
    context = begin(tmp_path)
    (tmp_path / "engine-and-trainer-disagree").touch()
    report = cycle_of(tmp_path)
    assert report.promotion is not None
    assert report.promotion.outcome is PromotionOutcome.REFUSED
    assert "k3 0.204" in report.promotion.reason
    assert "limit 1e-06" in report.promotion.reason
    assert "cycle.learning.parity" in report.promotion.reason
    [entry] = context.ledger.promotions.history("mine")
    assert entry.checkpoint_id == "reinforced/mine@1"
    [cycle] = context.ledger.cycles.history("mine")
    assert (cycle.outcome, context.ledger.cycles.last_closed_watermark("mine")) == ("refused", 40)
    (tmp_path / "engine-and-trainer-disagree").unlink()
    interact(context, 30, first=40)

    again = cycle_of(tmp_path)

    assert again.promotion is not None
    assert again.promotion.outcome is PromotionOutcome.PROMOTED
    assert trainings(tmp_path) == ["0..40", "40..70"]


def test_cycle_opens_for_interactions_of_its_own_source_alone(tmp_path: Path, home: Path) -> None:
    people = begin(tmp_path)  # 40 interactions of people
    served = people.artifacts.get("reinforced/mine@1")
    cycle = people.recipe.cycle.model_copy(update={"simulated_users": SimulatedUsersConfig()})
    simulated = replace(people, recipe=people.recipe.model_copy(update={"cycle": cycle}))
    assert realtime.open_cycle(simulated, served) is None
    interact(people, 1, first=40, tenant=SIMULATED_TENANT)
    assert realtime.open_cycle(simulated, served) is not None


def test_cycles_trainer_is_told_what_the_engine_that_served_may_differ_by(
    tmp_path: Path, home: Path
) -> None:
    begin(tmp_path)
    cycle_program.run(tmp_path, "", LINE + '[decoding]\nprecision = "bf16"\n')
    assert (tmp_path / "parity-limit.txt").read_text() == "0.0005"


def test_late_cycle_trims_its_training_and_never_the_gate(tmp_path: Path, home: Path) -> None:
    context = begin(tmp_path)
    served = context.artifacts.get("reinforced/mine@1")
    opened_at = time.time() - 86_400.0
    context.ledger.cycles.open(
        "mine-0", line="mine", served=str(served), from_watermark=0, to_watermark=40, at=opened_at
    )
    report = cycle_of(tmp_path)
    told = float((tmp_path / "train-until.txt").read_text())
    cycle = context.recipe.cycle
    assert cycle.deadline_seconds is not None
    assert told == opened_at + cycle.deadline_seconds - cycle.gate_seconds
    assert report.promotion is not None
    assert report.promotion.outcome is PromotionOutcome.PROMOTED
    assert report.candidate_scorecard is not None
    assert report.champion_scorecard is not None
    assert len(report.candidate_scorecard.problems) == len(report.champion_scorecard.problems)
