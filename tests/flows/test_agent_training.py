"""The whole chain at miniature size: every stage real, run once, and nothing of it twice."""

from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterType

from ostinato.flows.agent_training import agent_training
from ostinato.flows.stages import chain
from ostinato.flows.stages.run_options import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.tasks.reinforcement.records import ReinforcementResult


@pytest.mark.timeout(1_200)
def test_agent_training_run_again_repeats_nothing(prefect_server: None, home: Path) -> None:
    options = RunOptions(
        overrides=(
            "reinforcement.evaluation.every_steps=2",
            "reinforcement.evaluation.problems=2",
            "reinforcement.evaluation.attempts_per_problem=2",
        )
    )
    page = Path(agent_training("miniature", options=options))
    assert "unseen mutations" in page.read_text()
    context = StageContext.open("miniature", None, options)
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
    [reinforced] = context.ledger.artifacts.list("reinforced")
    ref = context.artifacts.get(f"reinforced/{reinforced.name}@{reinforced.version}")
    points = chain.result_of(context, ref, ReinforcementResult).evaluations
    assert [point.step for point in points] == [0, 2]
    assert points[0].average is not None
    pictures = get_client(sync_client=True).read_artifacts(
        artifact_filter=ArtifactFilter(type=ArtifactFilterType(any_=["image"]))
    )
    assert any("reinforcement-evaluation" in (picture.key or "") for picture in pictures)
    finished = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}

    again = Path(agent_training("miniature", options=options))

    assert again == page
    unchanged = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}
    assert unchanged == finished
