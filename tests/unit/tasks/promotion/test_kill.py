"""SIGKILL inside a promotion: the next process finishes or undoes it, and the cycle goes on."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.infra.platform.ledger import Ledger
from ostinato.tasks.promotion.champion import PromotionDesk, PromotionOutcome
from tests.unit.tasks.promotion.test_champion import decision

KILLED_BEFORE = """
import os, signal, sys
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.promotions import PromotionRepository
from ostinato.tasks.promotion.champion import PromotionDesk
from tests.unit.tasks.promotion.test_champion import decision

ledger = Ledger(sys.argv[1])
flip = PromotionRepository._flip

def die(repository, entry_id):
    if sys.argv[2] == "after_flip":
        flip(repository, entry_id)
    os.kill(os.getpid(), signal.SIGKILL)

PromotionRepository._flip = die
PromotionDesk(ledger, clock=lambda: 2.0).decide(decision("b"))
"""


@pytest.mark.parametrize(
    ("moment", "champion", "outcome"),
    [
        ("before_flip", "a", PromotionOutcome.PROMOTED),
        ("after_flip", "b", PromotionOutcome.UNCHANGED),
    ],
)
def test_sigkill_is_repaired(
    tmp_path: Path, moment: str, champion: str, outcome: PromotionOutcome
) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    desk = PromotionDesk(ledger, clock=lambda: 1.0)
    desk.decide(decision("a"))
    script = [sys.executable, "-c", KILLED_BEFORE, ledger.url, moment]
    killed = subprocess.run(script, capture_output=True, text=True, timeout=50, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    desk.repair()
    pointer = ledger.promotions.current()
    assert pointer is not None
    assert pointer.checkpoint_id == champion
    assert desk.decide(decision("b")).outcome is outcome
    assert [
        entry.to_checkpoint_id for entry in ledger.promotions.history() if entry.state == "closed"
    ] == ["a", "b"]
