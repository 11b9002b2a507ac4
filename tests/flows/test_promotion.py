"""Promotion and rollback as flows: under the gate, once, and back to the one before."""

import contextlib
import json
from pathlib import Path

import pytest

from ostinato.flows.commands.run_flow import main as run_flow
from ostinato.flows.rollback import rollback
from ostinato.flows.stages.forms import RunOptions
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import PromotionRow
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.realtime.promotion.serving_line import PromotionOutcome
from tests.flows.test_checkpoint_evaluation import prepare

LINE = '[serving]\nline = "mine"\n'


def promote(recipe: str, checkpoint: str) -> int:
    return run_flow(
        ["promotion", "--recipe", recipe, "--parameters", json.dumps({"checkpoint": checkpoint})]
    )


def history(home: Path) -> list[PromotionRow]:
    ledger: Ledger
    with contextlib.closing(open_ledger(Settings(home=home))) as ledger:
        return ledger.promotions.history("mine")


def test_checkpoint_is_promoted_once_although_the_store_failed_and_taken_back(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    recipe, [first, weak, strong] = prepare(tmp_path, 0.5, 0.2, 0.6, text=LINE)
    assert promote(recipe, first) == 0
    assert promote(recipe, weak) == 1
    assert [row.checkpoint_id for row in history(home)] == [first]

    stored, away = home / "objects/artifacts/reinforced", home / "away"
    stored.rename(away)
    assert promote(recipe, strong) == 2
    away.rename(stored)
    for _ in range(2):
        assert promote(recipe, strong) == 0
    assert [row.checkpoint_id for row in history(home)] == [first, strong]

    assert rollback(recipe, checkpoint=weak).outcome is PromotionOutcome.UNCHANGED
    report = rollback(recipe, reason="slow")
    assert (report.outcome, report.candidate) == (PromotionOutcome.ROLLED_BACK, strong)
    assert [row.action for row in history(home)] == ["promote", "promote", "roll_back"]
    assert history(home)[-1].checkpoint_id == first


def test_rollback_of_a_line_without_a_champion_is_refused(prefect_server: None, home: Path) -> None:
    with pytest.raises(ConfigError, match="serving line 'mine' has no champion"):
        rollback(line="mine")
    changed = RunOptions(overrides=('serving.line="other"',))
    with pytest.raises(ConfigError, match="serving line 'other' has no champion"):
        rollback("nano", options=changed)
