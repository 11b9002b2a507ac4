"""Baselines travel from closed cycles only: a cycle run again starts from the same ones."""

from pathlib import Path

from infra.gateway.signals import Signal
from infra.ledger import Ledger
from tasks.feedback.baseline import Baselines
from tasks.feedback.carry_over import STAGE, carried_baselines, distil_payload
from tasks.feedback.config import FeedbackConfig
from tasks.feedback.distil import distil
from tasks.feedback.interactions import Collection
from tests.unit.tasks.feedback.interactions import interaction


def test_open_cycle_hands_nothing_on_until_it_closes(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    taken = (interaction((Signal.EDIT_KEPT, 1), name="a"), interaction(name="b"))
    collection = Collection(from_watermark=0, to_watermark=2, interactions=taken, skipped=())
    distilled = distil(taken, carried_baselines(ledger), FeedbackConfig())
    ledger.cycles.open("cycle-1", 0, 2, at=1.0)
    payload = distil_payload(collection, distilled)
    ledger.cycles.update("cycle-1", STAGE, payload)
    assert carried_baselines(ledger) == Baselines()
    ledger.cycles.close("cycle-1", "promoted", at=2.0)
    assert carried_baselines(ledger) == distilled.baselines
    assert payload["reasons"] == {"edit_kept": 1, "no_feedback": 1}
