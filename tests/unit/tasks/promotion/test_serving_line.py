"""Promotion: nothing without a passed gate, once each, and back by itself when users are worse
off.
"""

from pathlib import Path

import pytest

from ostinato.infra.platform.ledger import Ledger
from ostinato.tasks.promotion.champion import PromotionDesk, PromotionOutcome
from ostinato.tasks.promotion.guard import Advice, GuardReport
from ostinato.tasks.records import GateDecision, Metric, Scorecard

METRIC = Metric(mean=0.5, low=0.4, high=0.6, count=20)


def decision(candidate: str, *, passed: bool = True, round_id: str = "1") -> GateDecision:
    return GateDecision(
        gate_id=f"gate-{candidate}-{round_id}",
        candidate=candidate,
        candidate_scorecard_id=f"card-{candidate}-{round_id}",
        champion=None,
        champion_scorecard_id=None,
        passed=passed,
        difference=METRIC,
        checks=(),
        reason="passed: as good" if passed else "refused: 10 points worse",
    )


def scorecard(checkpoint: str) -> Scorecard:
    return Scorecard(
        scorecard_id=f"card-{checkpoint}-1",
        suite="held_out",
        checkpoint=checkpoint,
        attempts_per_problem=4,
        temperature=1.0,
        average=METRIC,
        best_of=METRIC,
        generated_tokens=METRIC,
        turns=METRIC,
        tool_calls=METRIC,
        broken_call_ratio=0.0,
        problems=(),
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()


@pytest.fixture
def desk(ledger: Ledger) -> PromotionDesk:
    return PromotionDesk(ledger, clock=lambda: 100.0)


def champion(ledger: Ledger) -> str | None:
    pointer = ledger.promotions.current()
    return pointer.checkpoint_id if pointer is not None else None


def test_passed_gate_promotes_and_refused_gate_does_not(
    desk: PromotionDesk, ledger: Ledger
) -> None:
    assert desk.decide(decision("a")).outcome is PromotionOutcome.PROMOTED
    refused = desk.decide(decision("b", passed=False))
    assert (refused.outcome, refused.champion) == (PromotionOutcome.REFUSED, "a")
    assert refused.reason == "refused: 10 points worse"
    assert champion(ledger) == "a"


def test_deciding_twice_changes_nothing(desk: PromotionDesk, ledger: Ledger) -> None:
    desk.decide(decision("a"))
    history = ledger.promotions.history()
    assert desk.decide(decision("a")).outcome is PromotionOutcome.UNCHANGED
    assert ledger.promotions.history() == history
    assert len(ledger.events.recent("promotion")) == 1


def test_rolled_back_candidate_is_not_promoted_again_on_the_same_scorecard(
    desk: PromotionDesk, ledger: Ledger
) -> None:
    desk.decide(decision("a"))
    desk.decide(decision("b"))
    desk.roll_back("b", "users revert more")
    assert desk.decide(decision("b")).outcome is PromotionOutcome.UNCHANGED
    assert champion(ledger) == "a"
    assert desk.decide(decision("b", round_id="2")).outcome is PromotionOutcome.PROMOTED


def test_roll_back_names_the_one_that_must_go(desk: PromotionDesk, ledger: Ledger) -> None:
    desk.decide(decision("a"))
    desk.decide(decision("b"))
    desk.roll_back("b", "worse")
    desk.roll_back("b", "worse")  # repeated after a kill: a stays
    assert champion(ledger) == "a"
    assert [entry.action for entry in ledger.promotions.history()] == [
        "promote",
        "promote",
        "roll_back",
    ]


@pytest.mark.parametrize("is_flipped", [False, True])
def test_kill_inside_a_promotion_is_repaired(
    desk: PromotionDesk, ledger: Ledger, is_flipped: bool
) -> None:
    desk.decide(decision("a"))
    promotions = ledger.promotions
    entry = promotions._open_entry("promote", "b", "card-b-1", "passed", 1.0)
    if is_flipped:
        promotions._flip(entry)
    desk.repair()
    assert champion(ledger) == ("b" if is_flipped else "a")
    assert [row.state for row in promotions.history()] == [
        "closed",
        "closed" if is_flipped else "undone",
    ]
    expected = PromotionOutcome.UNCHANGED if is_flipped else PromotionOutcome.PROMOTED
    assert desk.decide(decision("b")).outcome is expected
    assert champion(ledger) == "b"


def test_scorecard_of_the_champion_comes_back(desk: PromotionDesk, ledger: Ledger) -> None:
    assert desk.champion_scorecard() is None
    desk.publish_candidate(scorecard("a"), decision("a"))
    desk.decide(decision("a"))
    assert desk.champion_scorecard() == scorecard("a")
    row = ledger.scorecards.get("card-a-1")
    assert row is not None
    assert row.passed is True


def test_canary_opens_once_and_closes(desk: PromotionDesk, ledger: Ledger) -> None:
    assert desk.canary() is None
    first = desk.start_canary("b", 0.2)
    assert desk.start_canary("b", 0.2) == first == desk.canary()
    replaced = desk.start_canary("c", 0.2)
    assert desk.canary() == replaced
    desk.stop_canary("decided")
    desk.stop_canary("decided")
    assert desk.canary() is None
    assert len(ledger.events.recent("promotion")) == 4


def test_guard_takes_a_worse_champion_away_and_leaves_a_fine_one(
    desk: PromotionDesk, ledger: Ledger
) -> None:
    desk.decide(decision("a"))
    desk.start_canary("b", 0.5)
    desk.decide(decision("b"))
    fine = GuardReport(advice=Advice.FINE, reason="not worse", measures=())
    worse = GuardReport(advice=Advice.ROLL_BACK, reason="worse: edit_kept 0.6 -> 0.2", measures=())
    assert not desk.obey(fine, "b")
    assert champion(ledger) == "b"
    assert desk.obey(worse, "b")
    assert (champion(ledger), desk.canary()) == ("a", None)
    assert ledger.promotions.history()[-1].reason == worse.reason
