"""SIGKILL inside a promotion: the champion and its history change together or not at all."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.infra.platform.ledger import Ledger
from ostinato.tasks.realtime.promotion.serving_line import PromotionOutcome, ServingLine
from tests.unit.tasks.realtime.promotion.test_serving_line import decision

KILLED = """
import os, signal, sys
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.repositories import PROMOTIONS, PromotionRepository
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from tests.unit.tasks.realtime.promotion.test_serving_line import decision

ledger = Ledger(sys.argv[1])
# inside: after the row is inserted, before the transaction ends
owner, name = (
    (type(PROMOTIONS), "insert") if sys.argv[2] == "inside" else (PromotionRepository, "promote")
)
whole = getattr(owner, name)

def die(*arguments, **named):
    whole(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, die)
ServingLine(ledger, "nano", clock=lambda: 2.0).decide(decision("b"))
"""


@pytest.mark.parametrize(("moment", "champion"), [("inside", "a"), ("after", "b")])
@pytest.mark.sampled(1)
def test_sigkill_leaves_all_of_a_promotion_or_nothing(
    tmp_path: Path, moment: str, champion: str
) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    line = ServingLine(ledger, "nano", clock=lambda: 1.0)
    line.decide(decision("a"))
    script = [sys.executable, "-c", KILLED, ledger.url, moment]
    killed = subprocess.run(script, capture_output=True, text=True, timeout=200, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert line.champion() == champion
    # nobody was told of it yet: promoted once, told once
    assert line.decide(decision("b")).outcome is PromotionOutcome.PROMOTED
    assert line.decide(decision("b")).outcome is PromotionOutcome.UNCHANGED
    history = ledger.promotions.history("nano")
    assert [entry.checkpoint_id for entry in history] == ["a", "b"]
