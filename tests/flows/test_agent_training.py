"""The installed command's whole chain at miniature size on an S3 server and PostgreSQL: every stage real, nothing of
it twice. (Changed code: test_rebuilds.)
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ostinato.flows.operating.local_prefect import prefect_environment, server_service
from ostinato.flows.stages import chain
from ostinato.flows.stages.chain import OVERLAP_FILE, TrainingOverlap
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.pretraining.config import PretrainingResult
from ostinato.tasks.reinforcement.records import ReinforcementResult
from tests.fakes.prefect_here import open_api
from tests.fakes.project_copy import Installation, times_of_results
from tests.fakes.storage import remote_storage

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_look.ipynb"
INSTALLED = "OSTINATO_TEST_COMMAND"  # what a wheel installed; `.ci/wheel` sets it
OVERRIDES = (
    "reinforcement.evaluation.every_steps=2",
    "reinforcement.evaluation.problems=2",
    "reinforcement.evaluation.attempts_per_problem=2",
    "mtp.after_phase=bulk",
    "learning.trains_drafts=true",
)
KINDS = {
    "problems",
    "corpus",
    "pretrained",
    "drafted",
    "speculation",
    "reinforced",
    "scorecard",
    "candidate",
}
AWS_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")


@pytest.fixture
def remote_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose objects and ledger are on servers."""
    with remote_storage(home.name) as told:
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        for name in AWS_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        yield home


def test_stage_context_keeps_objects_on_the_server_that_the_settings_name(
    remote_home: Path,
) -> None:
    context = StageContext.open("miniature")
    context.objects.put_bytes("key", b"value")
    assert context.objects.list() == ["key"]
    assert context.ledger.promotions.history("tests") == []


@pytest.fixture
def prefect(remote_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx2.Client]:
    """A Prefect server that the home's commands find, and its API."""
    port = find_free_port()
    monkeypatch.setenv("OSTINATO_PREFECT_PORT", str(port))
    settings = Settings(home=remote_home)
    told = prefect_environment(settings, port)
    with ServiceGroup() as services, open_api(told) as api:
        services.start(server_service(settings, port, told))
        yield api


@pytest.mark.chain
@pytest.mark.timeout(1_500)
def test_the_chain_runs_and_the_same_command_again_builds_nothing(
    remote_home: Path, prefect: httpx2.Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = [word for override in OVERRIDES for word in ("--set", override)]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = os.environ.get(INSTALLED, str(Path(sys.executable).with_name("ostinato")))
    installed = Installation(remote_home, elsewhere, [command])
    assert installed.built_by_demo(*settings).keys() >= KINDS
    [page] = remote_home.glob("reports/*/report.html")
    assert "held-out mutations" in page.read_text()
    context = StageContext.open("miniature", None, RunOptions(overrides=OVERRIDES))
    check_artifacts(context)
    check_notebook()
    assert not (remote_home / "objects").exists()
    assert not (remote_home / "ledger.db").exists()
    check_evaluation_points(context, prefect)
    check_draft_layers(context)
    finished = times_of_results(remote_home)

    assert not installed.built_by_demo(*settings)
    assert times_of_results(remote_home) == finished


def check_notebook() -> None:
    """The cells of the notebook run on the home of the environment, in their order."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["run"].name == "miniature-seed0"
    assert len(names["attempts"]) >= len(names["solved"])
    assert names["axes"].lines


def check_artifacts(context: StageContext) -> None:
    """All are in the ledger and the store, the weights' chain too, and the cycle has promoted and closed."""
    for kind in KINDS:
        rows = context.ledger.artifacts.list(kind)
        assert rows, kind
        for row in rows:
            assert context.objects.exists(f"{row.object_prefix}/artifact.json")
    assert any("chain" in key for key in context.objects.list())
    assert context.ledger.promotions.current("tests") is not None
    [cycle] = context.ledger.cycles.history("tests")
    assert cycle.closed_at is not None
    for row in context.ledger.artifacts.list("scorecard"):
        ref = context.artifacts.get(f"scorecard/{row.name}@{row.version}")
        overlap = (context.directory_of(ref) / OVERLAP_FILE).read_bytes()
        assert TrainingOverlap.model_validate_json(overlap).corpora, ref


def check_evaluation_points(context: StageContext, prefect: httpx2.Client) -> None:
    """RL was evaluated under way, and the run's page has a picture of it."""
    [reinforced] = context.ledger.artifacts.list("reinforced")
    ref = context.artifacts.get(f"reinforced/{reinforced.name}@{reinforced.version}")
    points = chain.result_of(context, ref, ReinforcementResult).evaluations
    assert [point.step for point in points] == [0, 2]
    assert points[0].average is not None
    wanted = {"artifacts": {"type": {"any_": ["markdown"]}}}
    pictures = prefect.post("artifacts/filter", json=wanted).raise_for_status().json()
    keys = {picture["key"] or "" for picture in pictures}
    for plot in (
        *("pretraining-loss", "pretraining-perplexity", "mtp-kl", "reinforcement-evaluation"),
        *("reinforcement-solve-rate", "reinforcement-staleness", "reinforcement-weight-chain"),
    ):
        assert any(key.endswith(plot) for key in keys), (plot, keys)


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
