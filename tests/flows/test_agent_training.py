"""The whole chain at miniature size: every stage real, run once, and nothing of it twice."""

from pathlib import Path

import pytest

from ostinato.flows.agent_training import agent_training
from ostinato.flows.stages.stage import StageContext


@pytest.mark.timeout(600)
def test_agent_training_run_again_repeats_nothing(prefect_server: None, home: Path) -> None:
    page = Path(agent_training("miniature"))
    assert "unseen mutations" in page.read_text()
    context = StageContext.open("miniature")
    kinds = {
        "problems",
        "corpus",
        "pretrained",
        "drafted",
        "speculation",
        "reinforced",
        "scorecard",
        "candidate",
    }
    made = {row.kind for kind in kinds for row in context.ledger.artifacts.list(kind)}
    assert made == kinds
    assert context.ledger.promotions.current("tests") is not None
    [cycle] = context.ledger.cycles.history("tests")
    assert cycle.closed_at is not None
    finished = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}

    again = Path(agent_training("miniature"))

    assert again == page
    unchanged = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}
    assert unchanged == finished
