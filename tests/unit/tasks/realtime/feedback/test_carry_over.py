"""Baselines travel from closed cycles only: a cycle run again starts from the same ones."""

from pathlib import Path

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.config import FeedbackConfig
from ostinato.tasks.realtime.cycle_training import DISTIL_STAGE, carried_baselines, distil_payload
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.distil import distil
from ostinato.tasks.realtime.feedback.interactions import Collection, Window
from tests.unit.tasks.realtime.feedback.interactions import interaction

WINDOW = Window(
    line="toy",
    served="nano@1",
    from_watermark=0,
    to_watermark=2,
    feedback_after=0.0,
    feedback_until=1.0,
)


def test_open_cycle_hands_nothing_on_until_it_closes(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    taken = (interaction((Signal.EDIT_KEPT, 1), name="a"), interaction(name="b"))
    collection = Collection(window=WINDOW, interactions=taken, skipped=())
    distilled = distil(taken, carried_baselines(ledger, "toy"), FeedbackConfig())
    ledger.cycles.open(
        "cycle-1", line="toy", served="nano@1", from_watermark=0, to_watermark=2, at=1.0
    )
    payload = distil_payload(collection, distilled)
    ledger.cycles.update("cycle-1", DISTIL_STAGE, payload)
    assert carried_baselines(ledger, "toy") == Baselines()
    ledger.cycles.close("cycle-1", "promoted", at=2.0)
    assert carried_baselines(ledger, "toy") == distilled.baselines
    assert payload["reasons"] == {"edit_kept": 1, "no_feedback": 1}
