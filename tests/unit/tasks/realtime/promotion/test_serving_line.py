"""Promotion: nothing without a passed gate, once each, and back by itself when users are worse
off.
"""

from pathlib import Path

import pytest
from sqlalchemy import insert

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import FeedbackRow
from ostinato.infra.platform.ledger.tables import EVENTS
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.canary_status import canary_status
from ostinato.tasks.realtime.promotion.guard import Advice
from ostinato.tasks.realtime.promotion.serving_line import PromotionOutcome, ServingLine
from ostinato.tasks.records import GateDecision, Metric, Scorecard
from tests.fakes.interactions import new_interaction
from tests.fakes.scorecards import flat_scorecard

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
    return flat_scorecard(checkpoint, METRIC, scorecard_id=f"card-{checkpoint}-1")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()


@pytest.fixture
def line(ledger: Ledger) -> ServingLine:
    return ServingLine(ledger, "nano", clock=lambda: 100.0)


def champion(ledger: Ledger) -> str | None:
    pointer = ledger.promotions.current("nano")
    return pointer.checkpoint_id if pointer is not None else None


def test_passed_gate_promotes_and_refused_gate_does_not(line: ServingLine, ledger: Ledger) -> None:
    assert line.decide(decision("a")).outcome is PromotionOutcome.PROMOTED
    refused = line.decide(decision("b", passed=False))
    assert (refused.outcome, refused.champion) == (PromotionOutcome.REFUSED, "a")
    assert refused.reason == "refused: 10 points worse"
    assert champion(ledger) == "a"


def test_deciding_twice_changes_nothing(line: ServingLine, ledger: Ledger) -> None:
    line.decide(decision("a"))
    history = ledger.promotions.history("nano")
    assert line.decide(decision("a")).outcome is PromotionOutcome.UNCHANGED
    assert ledger.promotions.history("nano") == history
    assert len(ledger.events.recent("promotion/nano")) == 1


def test_rolled_back_candidate_is_not_promoted_again_on_the_same_scorecard(
    line: ServingLine, ledger: Ledger
) -> None:
    line.decide(decision("a"))
    line.decide(decision("b"))
    line.roll_back("b", "users revert more")
    assert line.decide(decision("b")).outcome is PromotionOutcome.UNCHANGED
    assert champion(ledger) == "a"
    assert line.decide(decision("b", round_id="2")).outcome is PromotionOutcome.PROMOTED


def test_roll_back_names_the_one_that_must_go(line: ServingLine, ledger: Ledger) -> None:
    line.decide(decision("a"))
    line.decide(decision("b"))
    assert line.roll_back("b", "worse").outcome is PromotionOutcome.ROLLED_BACK
    again = line.roll_back("b", "worse")  # repeated after a kill: a stays
    assert (again.outcome, again.champion) == (PromotionOutcome.UNCHANGED, "a")
    assert champion(ledger) == "a"
    assert [entry.action for entry in ledger.promotions.history("nano")] == [
        "promote",
        "promote",
        "roll_back",
    ]


def test_canary_opens_once_per_decision_and_closes(line: ServingLine, ledger: Ledger) -> None:
    assert line.canary() is None
    assert line.start_canary(decision("b"), 0.2).outcome is PromotionOutcome.CANARY
    first = line.canary()
    line.start_canary(decision("b"), 0.2)
    assert first == line.canary()
    line.start_canary(decision("c"), 0.2)
    assert line.canary() != first
    line.stop_canary("decided")
    line.start_canary(decision("c"), 0.2)  # the cycle's stage again, after a kill
    assert line.canary() is None
    assert len(ledger.events.recent("promotion/nano")) == 4


def test_canary_and_its_end_are_remembered_however_much_was_decided_since(
    line: ServingLine, ledger: Ledger
) -> None:
    open_canary(ledger)
    assert ServingLine(ledger, "nano", clock=lambda: 100.0).watch_canary(GUARD) is None
    line.start_canary(decision("c"), 0.2)
    with ledger.events._database.write() as connection:
        values = {"source": "promotion/nano", "name": "refused", "payload": {}, "at": 1.0}
        connection.execute(insert(EVENTS.table), [values] * 1_001)
    canary, end = line.canary(), line.unannounced_end()
    assert canary is not None
    assert end is not None
    assert (canary.checkpoint_id, end.checkpoint_id) == ("c", "b")
    assert line.was_offered("b")
    line.start_canary(decision("c"), 0.2)
    assert line.canary() == canary


def record(
    ledger: Ledger, index: int, arm: str, checkpoint: str, *, kept: bool, at: float = 1.0
) -> None:
    """An interaction of a session of its own, and what was said about it."""
    answered = new_interaction(f"i{index}", "nano", checkpoint)
    ledger.interactions.record(answered.model_copy(update={"arm": arm, "created_at": at}))
    ledger.interactions.add_feedback(
        FeedbackRow(
            feedback_id=f"f{index}",
            interaction_id=f"i{index}",
            signal="edit_kept" if kept else "edit_reverted",
            value=1.0,
            created_at=at,
        )
    )


GUARD = GuardConfig(minimum_sessions=20, looks=1, minimum_seconds=50.0, settle_seconds=10.0)


@pytest.mark.parametrize(("kept_by_candidate", "serves"), [(True, "b"), (False, "a")])
def test_canary_is_promoted_or_withdrawn_by_what_its_users_do(
    ledger: Ledger, kept_by_candidate: bool, serves: str
) -> None:
    now = [0.0]
    line = ServingLine(ledger, "nano", clock=lambda: now[0])
    line.decide(decision("a"))
    line.start_canary(decision("b"), 0.5)
    for index in range(40):
        arm, checkpoint = (("control", "a"), ("candidate", "b"))[index % 2]
        kept = kept_by_candidate or arm == "control"
        record(ledger, index, arm, checkpoint, kept=kept)
    now[0] = 5.0
    assert line.watch_canary(GUARD) == line.canary()  # nothing is settled
    now[0] = 60.0
    assert line.watch_canary(GUARD) is None
    end = line.unannounced_end()
    assert end is not None
    wanted = Advice.PROMOTE if serves == "b" else Advice.ROLL_BACK
    assert (end.checkpoint_id, end.advice) == ("b", wanted)
    assert line.canary() is None
    assert (champion(ledger), line.watch_canary(GUARD)) == (serves, None)
    assert line.unannounced_end() == end, "until somebody was told"
    line.note_announced(end)
    assert line.unannounced_end() is None


@pytest.mark.parametrize("settle_seconds", [0.0, 10.0])
@pytest.mark.parametrize("said_at", [None, 30.0])
def test_canary_that_nobody_judged_in_time_is_withdrawn_and_one_that_all_revert_late_too(
    ledger: Ledger, settle_seconds: float, said_at: float | None
) -> None:
    """Feedback after the settle time, and none at all: neither promotes."""
    guard = GUARD.model_copy(update={"settle_seconds": settle_seconds, "maximum_seconds": 1_000.0})
    now = [0.0]
    line = ServingLine(ledger, "nano", clock=lambda: now[0])
    line.decide(decision("a"))
    line.start_canary(decision("b"), 0.5)
    for index in range(60):
        arm, checkpoint = (("control", "a"), ("candidate", "b"))[index % 2]
        answered = new_interaction(f"i{index}", "nano", checkpoint)
        ledger.interactions.record(
            answered.model_copy(
                update={"arm": arm, "created_at": 1.0, "session_id": f"session{index}"}
            )
        )
        if said_at is not None:
            signal = "edit_kept" if arm == "control" else "edit_reverted"
            ledger.interactions.add_feedback(
                FeedbackRow(
                    feedback_id=f"f{index}",
                    interaction_id=f"i{index}",
                    signal=signal,
                    value=1.0,
                    created_at=said_at,
                )
            )
    advice = Advice.ROLL_BACK if said_at is not None else Advice.EXPIRE
    for at in (25.0, 999.0, 1_000.0):
        now[0] = at
        line.watch_canary(guard)
        assert champion(ledger) == "a"
    end = line.unannounced_end()
    assert end is not None
    assert (end.advice, line.canary()) == (advice, None)
    if advice is Advice.EXPIRE:
        assert end.reason == (
            "undecided after 0.3 h: edits kept or reverted in 0 control and 0 candidate sessions, "
            "wanted 20 each"
        )


def open_canary(ledger: Ledger) -> None:
    """A canary of b against a, whose users say that b is as good."""
    line = ServingLine(ledger, "nano", clock=lambda: 0.0)
    line.decide(decision("a"))
    line.start_canary(against("b", "a"), 0.5)
    for index in range(40):
        record(ledger, index, *(("control", "a"), ("candidate", "b"))[index % 2], kept=True)


class Killed(BaseException):
    """End of a watcher."""


@pytest.mark.parametrize("look", range(1, 5))
def test_canary_whose_watcher_is_killed_ends_once_with_the_next(ledger: Ledger, look: int) -> None:
    open_canary(ledger)
    looks = iter(range(1, 100))

    def clock() -> float:
        if next(looks) == look:
            raise Killed
        return 60.0

    with pytest.raises(Killed):
        ServingLine(ledger, "nano", clock).watch_canary(GUARD)
    line = ServingLine(ledger, "nano", lambda: 61.0)
    assert line.watch_canary(GUARD) is None
    assert_promoted_once(ledger)
    end = line.unannounced_end()
    assert end is not None
    assert end.advice is Advice.PROMOTE


@pytest.mark.parametrize("look", range(1, 5))
def test_canary_of_two_watchers_ends_once(ledger: Ledger, look: int) -> None:
    """The second watches whole while the first looks at its clock; what it saw before is old by then."""
    open_canary(ledger)
    second = ServingLine(ledger, "nano", lambda: 60.0)
    looks = iter(range(1, 100))

    def clock() -> float:
        if next(looks) == look:
            assert second.watch_canary(GUARD) is None
        return 60.0

    first = ServingLine(ledger, "nano", clock)
    first.watch_canary(GUARD)
    assert first.watch_canary(GUARD) is None
    assert_promoted_once(ledger)
    end = first.unannounced_end()
    assert end is not None
    assert end == second.unannounced_end()


def test_end_that_nobody_was_told_of_outlasts_the_next_canary(ledger: Ledger) -> None:
    open_canary(ledger)
    line = ServingLine(ledger, "nano", lambda: 60.0)
    line.watch_canary(GUARD)
    line.start_canary(against("c", "b"), 0.5)
    opened = line.watch_canary(GUARD)
    assert opened is not None
    assert opened == line.canary()
    end = line.unannounced_end()
    assert end is not None
    assert end.checkpoint_id == "b"


def assert_promoted_once(ledger: Ledger) -> None:
    assert [entry.checkpoint_id for entry in ledger.promotions.history("nano")] == ["a", "b"]
    noted = [event.name for event in ledger.events.recent("promotion/nano")]
    assert sorted(noted) == ["canary_started", "canary_stopped", "promoted", "promoted"]


def test_candidate_is_not_promoted_over_a_champion_that_comes_just_now(ledger: Ledger) -> None:
    line = ServingLine(ledger, "nano", lambda: 0.0)
    line.decide(decision("a"))

    def clock() -> float:
        line.decide(against("c", "a"))  # after everything that the other one has read
        return 60.0

    report = ServingLine(ledger, "nano", clock).decide(against("b", "a"))
    assert (report.outcome, report.champion) == (PromotionOutcome.REFUSED, "c")


def against(candidate: str, champion: str) -> GateDecision:
    return decision(candidate).model_copy(update={"champion": champion})


def test_canary_ends_without_a_word_when_its_champion_is_replaced(ledger: Ledger) -> None:
    now = [0.0]
    line = ServingLine(ledger, "nano", clock=lambda: now[0])
    line.decide(decision("a"))
    line.start_canary(against("b", "a"), 0.5)
    line.decide(decision("c"))  # the gate never compared b with c
    for index in range(40):
        arm, checkpoint = (("control", "c"), ("candidate", "b"))[index % 2]
        record(ledger, index, arm, checkpoint, kept=True)
    now[0] = 60.0
    assert line.watch_canary(GUARD) is None
    assert (line.champion(), line.canary()) == ("c", None)


def test_recent_champions_are_those_that_stand_and_compare(line: ServingLine) -> None:
    for name in "abcd":
        other_suite = {"suite": "other"} if name == "b" else {}
        line.publish_candidate(scorecard(name).model_copy(update=other_suite), decision(name))
        line.decide(decision(name))
    line.roll_back("d", "a cheat that measured well must not be the one to beat")
    found = [card.checkpoint for card in line.recent_champions(scorecard("new"), 20)]
    assert sorted(found) == ["a", "c"]
    assert [card.checkpoint for card in line.recent_champions(scorecard("new"), 1)] == ["c"]


def test_candidate_compared_with_an_earlier_champion_is_refused(line: ServingLine) -> None:
    line.decide(decision("a"))
    line.decide(decision("c"))
    report = line.decide(against("b", "a"))
    assert (report.outcome, report.champion) == (PromotionOutcome.REFUSED, "c")
    assert report.reason.startswith("compared with a, but the champion is now c")


def test_answers_of_an_earlier_candidate_do_not_count(ledger: Ledger) -> None:
    now = [0.0]
    line = ServingLine(ledger, "nano", clock=lambda: now[0])
    line.decide(decision("a"))
    line.start_canary(against("b", "a"), 0.5)
    for index in range(40):  # sessions that an earlier candidate still answered, badly
        arm, checkpoint = (("control", "a"), ("candidate", "earlier"))[index % 2]
        record(ledger, index, arm, checkpoint, kept=arm == "control")
    now[0] = 60.0
    assert line.watch_canary(GUARD) == line.canary()  # no answer of b yet


def test_simulated_users_are_no_control_of_a_canary(ledger: Ledger) -> None:
    now = [0.0]
    line = ServingLine(ledger, "nano", clock=lambda: now[0])
    line.decide(decision("a"))
    line.start_canary(against("b", "a"), 0.5)
    for index in range(40):
        record(ledger, index, "candidate", "b", kept=False)
        name = f"simulated{index}"
        answered = new_interaction(name, "nano", "a").model_copy(
            update={"tenant": SIMULATED_TENANT, "session_id": name}
        )
        ledger.interactions.record(answered)
    now[0] = 60.0
    assert line.watch_canary(GUARD) == line.canary()  # nobody of the control arm yet


def test_users_of_a_canary_are_known_by_what_they_did_before_it_and_by_nothing_later(
    ledger: Ledger,
) -> None:
    """Whoever reverts all edits before a canary is alike to whoever did, whatever is said of these edits afterwards."""
    now = [60.0]
    line = ServingLine(ledger, "nano", lambda: now[0])
    line.decide(decision("a"))
    for index, tenant in enumerate(["ann", "bob", SIMULATED_TENANT] * 4):
        answered = new_interaction(f"before{index}", "nano", "a")
        ledger.interactions.record(answered.model_copy(update={"tenant": tenant}))
        say(ledger, f"before{index}", "edit_kept" if tenant == "ann" else "edit_reverted", 1.0)
    line.start_canary(against("b", "a"), 0.5)
    opened = line.canary()
    assert opened is not None
    kept = opened.groups.of("edit_kept")
    assert kept.keys() == {"ann", "bob"}
    assert kept["bob"] < kept["ann"]
    for index in range(12):
        say(ledger, f"before{index}", "edit_reverted", 30.0)
    assert line.canary() == opened

    for index in range(80):
        arm, checkpoint = (("control", "a"), ("candidate", "b"))[index % 2]
        answered = new_interaction(f"i{index}", "nano", checkpoint)
        tenant = ("ann", "bob", "new")[index % 3]
        ledger.interactions.record(answered.model_copy(update={"arm": arm, "tenant": tenant}))
        say(ledger, f"i{index}", "edit_kept" if tenant == "ann" else "edit_reverted", 2.0)
    now[0] = 200.0
    assert line.watch_canary(GUARD) is None
    end = line.last_end()
    assert end is not None
    assert end.advice is Advice.PROMOTE
    assert end.reason.endswith(
        "; users are compared with users who behaved alike before the canary"
    )


def say(ledger: Ledger, interaction_id: str, signal: str, at: float) -> None:
    ledger.interactions.add_feedback(
        FeedbackRow(
            feedback_id=f"{interaction_id}/{signal}",
            interaction_id=interaction_id,
            signal=signal,
            value=1.0,
            created_at=at,
        )
    )


def test_standing_of_a_canary_tells_arms_looks_and_what_it_waits_for(ledger: Ledger) -> None:
    guard = GUARD.model_copy(update={"minimum_sessions": 10, "looks": 3})
    open_canary(ledger)  # 20 sessions of each arm, at 1 s
    line = ServingLine(ledger, "nano", lambda: 60.0)
    record(ledger, 100, "candidate", "b", kept=True, at=55.0)  # not settled
    record(ledger, 101, "candidate", "c", kept=True)  # of another candidate
    canary = line.canary()
    assert canary is not None
    found = canary_status(line, canary, guard, 60.0)
    assert (found.control.checkpoint, found.candidate.checkpoint) == ("a", "b")
    assert (found.control.interactions, found.candidate.interactions) == (20, 21)
    assert (found.control.sessions, found.candidate.sessions) == (20, 20)
    assert found.candidate.share == 0.5
    test = found.test
    assert test is not None
    assert (test.looks_done, test.looks, test.next_look_sessions) == (2, 3, 40)
    assert test.last_verdict.startswith("not worse: edit_kept 1 -> 1")
    assert test.promoted_from == 50.0
    assert (test.next_look_judged_sessions, found.candidate.judged_sessions) == (20, 20)
    assert test.withdrawn_from == guard.maximum_seconds
    assert canary_status(line, canary, None, 60.0).test is None
    assert line.canary() == canary
