"""A canary of one checkpoint against another, with sessions of both arms, as a gateway leaves them."""

import time

from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import FeedbackRow
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from ostinato.tasks.records import GateDecision, Metric
from tests.fakes.interactions import new_interaction

CHAMPION, CANDIDATE = "candidate/toy@1", "candidate/toy@2"


def open_canary(
    settings: Settings, sessions: int, age_seconds: float, users: tuple[str, ...] = ("people",)
) -> None:
    """Begins the canary so long ago; every fourth session is the candidate's. Several users take turns, of whom every
    other left all answers before it unread.
    """
    began = time.time() - age_seconds
    ledger = open_ledger(settings)
    if ledger.promotions.current("toy") is None:
        ledger.promotions.promote("toy", CHAMPION, None, "the first", began - 1)
    for index in range(4 * len(users) if len(users) > 1 else 0):
        name, at = f"earlier{index}", began - 10
        earlier = {"tenant": users[index % len(users)], "created_at": at}
        answered = new_interaction(name, "toy", CHAMPION).model_copy(update=earlier)
        ledger.interactions.record(answered)
        signal = "edit_kept" if index % 2 else "abandoned"
        said = FeedbackRow(
            feedback_id=name, interaction_id=name, signal=signal, value=1.0, created_at=at
        )
        ledger.interactions.add_feedback(said)
    decision = GateDecision(
        gate_id="gate-2",
        candidate=CANDIDATE,
        candidate_scorecard_id="card-2",
        champion=CHAMPION,
        champion_scorecard_id=None,
        passed=True,
        difference=Metric(mean=0.1, low=0.0, high=0.2, count=20),
        checks=(),
        reason="passed",
    )
    ServingLine(ledger, "toy", lambda: began).start_canary(decision, 0.25)
    for index in range(sessions):
        arm, checkpoint = ("candidate", CANDIDATE) if index % 4 == 3 else ("control", CHAMPION)
        answered = new_interaction(f"i{index}", "toy", checkpoint)
        ledger.interactions.record(
            answered.model_copy(
                update={
                    "arm": arm,
                    "created_at": began + 1,
                    "tenant": users[index // 4 % len(users)],
                }
            )
        )
    ledger.close()
