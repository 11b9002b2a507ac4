"""The whole chain at miniature size: every stage real, run once, and nothing of it twice."""

from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterType

from ostinato.flows.agent_training import agent_training
from ostinato.flows.stages import chain
from ostinato.flows.stages.run_options import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.pretraining.config import PretrainingResult
from ostinato.tasks.reinforcement.records import ReinforcementResult


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_agent_training_run_again_repeats_nothing(prefect_server: None, home: Path) -> None:
    options = RunOptions(
        overrides=(
            "reinforcement.evaluation.every_steps=2",
            "reinforcement.evaluation.problems=2",
            "reinforcement.evaluation.attempts_per_problem=2",
            "mtp.after_phase=bulk",
            "learning.trains_drafts=true",
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
    check_draft_layers(context)
    finished = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}

    again = Path(agent_training("miniature", options=options))

    assert again == page
    unchanged = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}
    assert unchanged == finished


def check_draft_layers(context: StageContext) -> None:
    """They were distilled after the first phase and moved in the later ones and in RL."""
    trunk, pretrained = (context.artifacts.get(f"pretrained/miniature@{n}") for n in (1, 2))
    drafted, reinforced = (
        context.artifacts.get(f"{kind}/miniature@1") for kind in ("drafted", "reinforced")
    )
    assert context.parent_of(drafted, "pretraining") == trunk
    assert context.parent_of(pretrained, "mtp") == drafted
    assert context.parent_of(reinforced, "pretraining") == pretrained
    phases = chain.result_of(context, pretrained, PretrainingResult).phases
    assert [phase.name for phase in phases] == ["bulk", "transcripts"]
    name = "model.mtp.0.in_proj.weight"
    alone, joint, followed = (
        load_checkpoint(context.directory_of(ref)).weights[name]
        for ref in (drafted, pretrained, reinforced)
    )
    assert not alone.equal(joint)
    assert not joint.equal(followed)
