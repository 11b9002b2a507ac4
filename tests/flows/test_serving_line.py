"""Serving lines: users get what passed the gate of their own line, and nothing else."""

import time
from pathlib import Path

import httpx2
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages import realtime
from ostinato.flows.stages.events import send_event_now
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger.rows import FeedbackRow
from ostinato.tasks.evaluation.gates import gate_candidate
from ostinato.tasks.realtime.promotion.serving_line import PromotionOutcome
from ostinato.tasks.realtime.records import CycleTrainingResult
from tests.fakes.finished_stages import (
    add_checkpoint,
    add_problems,
    add_scorecard,
    make_scorecard,
    open_context,
)
from tests.fakes.interactions import new_interaction
from tests.fakes.prefect_here import wait_until

MINE = '[serving]\nline = "mine"\n[cycle.gate]\nfloor = 0.05\nmargin = 0.05\n'
TESTS = '[serving]\nline = "tests"\n'


def test_recipe_without_a_line_serves_nobody(tmp_path: Path, home: Path) -> None:
    context = open_context(tmp_path, "other")
    problems = add_problems(context, "a")
    trained = add_checkpoint(context, problems, "good")
    add_scorecard(context, problems, trained, 0.9)
    with pytest.raises(ConfigError, match="recipe 'other' has no serving line"):
        realtime.run_cycle(context, problems, trained)
    assert context.ledger.promotions.lines() == []


def test_line_is_not_inherited() -> None:
    assert load_recipe("nano").serving.line == "nano"
    assert load_recipe("miniature").serving.line == "tests"
    assert load_recipe("nano_base").serving.line is None


def test_first_checkpoint_below_the_floor_serves_nobody(tmp_path: Path, home: Path) -> None:
    context = open_context(tmp_path, "mine", MINE)
    problems = add_problems(context, "a")
    bad = add_checkpoint(context, problems, "bad")
    add_scorecard(context, problems, bad, 0.0)
    assert realtime.serving_checkpoint(context, problems, bad) is None
    assert realtime.run_cycle(context, problems, bad).served == ""
    with pytest.raises(ConfigError, match="serving line 'mine' has no checkpoint"):
        realtime.champion_ref(context)


def test_a_cycle_without_work_says_that_it_was_skipped(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(realtime, "send_cycle_skipped", lambda *said: told.append(said))
    context = open_context(tmp_path, "mine", MINE)
    problems = add_problems(context, "a")
    bad = add_checkpoint(context, problems, "bad")
    add_scorecard(context, problems, bad, 0.0)
    realtime.run_cycle(context, problems, bad)
    good = add_checkpoint(context, problems, "good")
    add_scorecard(context, problems, good, 0.9)
    assert realtime.run_cycle(context, problems, good).cycle_id == ""
    assert [line for line, _ in told] == ["mine", "mine"]
    assert "nothing is served" in told[0][1]
    assert "fewer than" in told[1][1]


def test_a_checkpoint_that_could_not_be_served_is_not_promoted(tmp_path: Path, home: Path) -> None:
    context = open_context(tmp_path, "mine", MINE)
    problems = add_problems(context, "a")
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported" / "config.json").write_text("{}")
    identity = context.artifacts.identify("checkpoint", "mine", {}, {}, ())
    imported = context.artifacts.publish(identity, tmp_path / "imported", {})
    with pytest.raises(ConfigError, match="has no problem set among its ancestors"):
        realtime.offer(context, problems, imported)


def test_floor_of_zero_is_for_the_line_of_tests_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "miniature"\nname = "mine"\n[serving]\nline = "mine"\n')
    with pytest.raises(ConfigError, match="floor is 0 on the serving line 'mine'"):
        load_recipe(str(path))


def test_lines_do_not_touch_one_another(tmp_path: Path, home: Path) -> None:
    served = {}
    for name, text in (("mine", MINE), ("quick", TESTS)):
        context = open_context(tmp_path, name, text)
        problems = add_problems(context, "a")
        trained = add_checkpoint(context, problems, name)
        add_scorecard(context, problems, trained, 0.5 if name == "mine" else 0.0)
        served[name] = realtime.serving_checkpoint(context, problems, trained)
    context = open_context(tmp_path, "mine", MINE)
    assert realtime.champion_ref(context) == served["mine"]
    assert realtime.champion_ref(context, "tests") == served["quick"]


def offered_on_other_problems(
    directory: Path, champion_rate: float, candidate_rate: float
) -> tuple[ArtifactRef | None, ArtifactRef, realtime.PromotionReport]:
    """What serves first, the candidate, and what the gate makes of it on another problem set."""
    context = open_context(directory, "mine", MINE)
    problems = add_problems(context, "a")
    champion = add_checkpoint(context, problems, "champion")
    add_scorecard(context, problems, champion, 0.5)
    first = realtime.serving_checkpoint(context, problems, champion)
    others = add_problems(context, "b")
    candidate = add_checkpoint(context, others, "candidate")
    add_scorecard(context, others, candidate, candidate_rate)
    add_scorecard(context, others, champion, champion_rate)
    return first, candidate, realtime.offer(context, others, candidate)


def test_champion_is_measured_again_on_other_problems(tmp_path: Path, home: Path) -> None:
    first, _, report = offered_on_other_problems(tmp_path, 0.6, 0.2)
    assert report.outcome is PromotionOutcome.REFUSED
    assert "solve rate 60.0 % -> 20.0 %" in report.reason
    assert report.champion == str(first)


def test_better_candidate_on_other_problems_takes_the_line(tmp_path: Path, home: Path) -> None:
    _, candidate, report = offered_on_other_problems(tmp_path, 0.2, 0.6)
    assert (report.outcome, report.champion) == (PromotionOutcome.PROMOTED, str(candidate))
    assert "no champion" not in report.reason


def test_gateway_serves_the_line_of_tests_only_when_asked_by_name(
    tmp_path: Path, home: Path
) -> None:
    quick = open_context(tmp_path, "quick", TESTS)
    with pytest.raises(ConfigError, match="wanted --line tests to serve it nevertheless"):
        quick.recipe.served_line(None, [])
    assert quick.recipe.served_line("tests", []) == "tests"
    mine = open_context(tmp_path, "mine", MINE).recipe
    assert mine.served_line(None, []) == "mine"
    assert mine.served_line("other", ["other"]) == "other"
    with pytest.raises(ConfigError, match=r"--line mien .* wanted one of \['mine', 'tests'\]"):
        mine.served_line("mien", [])


@pytest.mark.parametrize(("text", "share"), [("\n[cycle.canary]\nshare = 0.5\n", 0.5), ("", 0.2)])
def test_candidate_of_a_cycle_serves_people_beside_the_champion_first(
    text: str, share: float, tmp_path: Path, home: Path
) -> None:
    context = open_context(tmp_path, "mine", MINE + text)
    problems = add_problems(context, "a")
    champion = add_checkpoint(context, problems, "champion")
    add_scorecard(context, problems, champion, 0.5)
    assert realtime.serving_checkpoint(context, problems, champion) == champion
    candidate = add_checkpoint(context, problems, "candidate")
    cycle = context.ledger.cycles.open(
        "mine-0", line="mine", served=str(champion), from_watermark=0, to_watermark=0, at=0.0
    )
    cards = [
        make_scorecard(str(checkpoint), problems.fingerprint, rate)
        for checkpoint, rate in ((candidate, 0.6), (champion, 0.5))
    ]
    training = CycleTrainingResult(
        checkpoint_directory="",
        interactions=1,
        skipped=0,
        samples=1,
        mean_reward=0.0,
        metrics={},
    )
    report = realtime.ship(context, cycle, training, *cards)
    assert (report.outcome, report.champion) == (PromotionOutcome.CANARY, str(champion))
    model = realtime.served_model(context)
    assert model.checkpoint_id == str(champion)
    assert model.candidate is not None
    assert (model.candidate.checkpoint_id, model.candidate.share) == (str(candidate), share)


def test_candidate_whose_users_fare_worse_is_withdrawn_and_told_of_once_the_server_is_there(
    prefect_server: None, tmp_path: Path, home: Path
) -> None:
    guard = "minimum_sessions = 20\nlooks = 1\nminimum_seconds = 0\nsettle_seconds = 0\n"
    canary = f"\n[cycle.canary]\nshare = 0.5\n[cycle.canary.guard]\n{guard}"
    context = open_context(tmp_path, "mine", MINE + canary)
    problems = add_problems(context, "a")
    champion = add_checkpoint(context, problems, "champion")
    add_scorecard(context, problems, champion, 0.5)
    realtime.serving_checkpoint(context, problems, champion)
    candidate = add_checkpoint(context, problems, "candidate")
    card = make_scorecard(str(candidate), problems.fingerprint, 0.6)
    line = realtime.serving_line(context)
    line.start_canary(gate_candidate(card, None, context.recipe.cycle.gate), 0.5)
    for number in range(40):
        arm, served = (("control", champion), ("candidate", candidate))[number % 2]
        interaction = new_interaction(f"i{number}", "mine", str(served))
        interaction = interaction.model_copy(update={"arm": arm, "session_id": f"s{number}"})
        context.ledger.interactions.record(interaction)
        context.ledger.interactions.add_feedback(
            FeedbackRow(
                feedback_id=f"f{number}",
                interaction_id=f"i{number}",
                signal="edit_kept" if arm == "control" else "edit_reverted",
                value=1.0,
                created_at=interaction.created_at,
            )
        )
    wanted = {"filter": {"event": {"name": ["checkpoint.regressed"]}}}

    def told() -> list[str]:
        found = httpx2.post(f"{PREFECT_API_URL.value()}/events/filter", json=wanted)
        events = found.raise_for_status().json()["events"]
        return [event["payload"]["checkpoint"] for event in events]

    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{find_free_port()}/api"}):
        model = realtime.served_model(context)
    assert (model.checkpoint_id, model.candidate) == (str(champion), None)
    end = line.unannounced_end()
    assert end is not None
    for _ in range(2):  # by gateways that look at once
        assert send_event_now("regressed", end.checkpoint_id, f"mine/{end.decision.gate_id}")
    for _ in range(2):
        realtime.served_model(context)
    assert line.unannounced_end() is None
    wait_until("the event", told, 120)
    time.sleep(3)
    assert told() == [str(candidate)]
