"""Stages of a package between the shipped ones: order, identity, lookup by name, and weights that are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages import chain, declared, stage
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform import plugins
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, TrainingError
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.tasks.conversion import own_stage
from ostinato.tasks.conversion.pipeline import OwnStageRequest, PipelineConfig
from tests.fakes.finished_stages import add_problems, open_context
from tests.fakes.tiny_model import TINY, random_weights

_PACKAGE = """
def doubled(work):
    factor = work.settings.get("factor", 2.0)
    for name, weight in work.checkpoint.weights.items():
        yield name, weight * factor

def wrong(work):
    weights = [(name, weight) for name, weight in work.checkpoint.weights.items()]
    name, weight = weights[-1]
    how = work.settings["how"]
    if how == "fails":
        raise KeyError("no such column")
    last = {
        "missing": [], "text": [(name, "none")], "shape": [(name, weight[:1])],
        "nan": [(name, weight * float("nan"))], "extra": [(name, weight), ("more", weight)],
    }[how]
    return weights[:-1] + last
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with two stages."""
    site = tmp_path / "site"
    (site / "own-1.0.dist-info").mkdir(parents=True)
    (site / "own-1.0.dist-info" / "METADATA").write_text("Name: own\nVersion: 1.0\n")
    names = "doubled = own_stages:doubled\nwrong = own_stages:wrong\n"
    (site / "own-1.0.dist-info" / "entry_points.txt").write_text(f"[ostinato.stages]\n{names}")
    (site / "own_stages.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    monkeypatch.setattr(stage, "run_stage", _run_here)
    plugins.installed_entries.cache_clear()
    yield
    plugins.installed_entries.cache_clear()


def _run_here(_: str, __: str, request: OwnStageRequest, ___: type, directory: Path) -> Any:
    return own_stage.main(request, Workspace.open(directory, Settings(home=directory)))


def _finished(context: StageContext, problems: ArtifactRef, name: str) -> ArtifactRef:
    """A checkpoint as the shipped stage of that name leaves it."""

    def build(directory: Path) -> tuple[Path, dict]:
        made = save_checkpoint(directory / "checkpoint", TINY, random_weights(TINY))
        return made, {declared.SUMMARY: {"made_by": name}}

    return context.ensure(name, {}, (problems,), build)


_ORDER = '[pipeline]\nstages = ["pretraining", "mtp", "doubled", "reinforcement"{}]\n'


@pytest.mark.usefixtures("package")
def test_an_added_stage_runs_at_its_place_once(tmp_path: Path) -> None:
    context = open_context(tmp_path, "mine", _ORDER.format(""))
    problems = add_problems(context, "one")
    drafted = _finished(context, problems, "mtp")
    doubled = chain.run_added_stages(context, problems, drafted, "mtp")

    assert str(doubled) == "derived/mine@1"
    assert chain.run_added_stages(context, problems, drafted, "mtp") == doubled
    assert chain.run_added_stages(context, problems, drafted, "pretraining") == drafted
    before = load_checkpoint(context.directory_of(drafted)).weights
    after = load_checkpoint(context.directory_of(doubled)).weights
    assert all(torch.equal(after[name], 2 * weight) for name, weight in before.items())
    assert context.shipped_origin(doubled) == drafted
    assert context.parent_of(doubled, "problems") == problems
    assert context.artifacts.metadata(doubled)[declared.SUMMARY]["stage_name"] == "doubled"

    changed = open_context(tmp_path, "mine", _ORDER.format("") + "settings.doubled.factor = 3.0\n")
    tripled = chain.run_added_stages(changed, problems, drafted, "mtp")
    assert str(tripled) == "derived/mine@2"


@pytest.mark.usefixtures("package")
def test_newest_is_the_checkpoint_after_the_added_stages(tmp_path: Path) -> None:
    order = '[pipeline]\nstages = ["pretraining", "mtp", "reinforcement", "doubled"]\n'
    context = open_context(tmp_path, "mine", order)
    problems = add_problems(context, "one")
    reinforced = _finished(context, problems, "reinforcement")
    assert context.checkpoint_named("newest") == reinforced
    doubled = chain.run_added_stages(context, problems, reinforced, "reinforcement")
    assert context.checkpoint_named("newest") == doubled
    assert context.checkpoint_named(str(doubled)) == doubled
    assert context.shipped_run_directory(doubled).name == f"reinforced-{reinforced.fingerprint}"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "gave 'no further weight', wanted the tensor of"),
        ("text", "wanted the tensor of"),
        ("shape", "of shape"),
        ("nan", "not finite"),
        ("extra", "gave 'more' after the last weight"),
        ("fails", "stage 'wrong': KeyError"),
    ],
)
def test_weights_that_the_model_cannot_have_are_refused(
    tmp_path: Path, how: str, message: str
) -> None:
    text = _ORDER.format("").replace("doubled", "wrong") + f'settings.wrong.how = "{how}"\n'
    context = open_context(tmp_path, "mine", text)
    problems = add_problems(context, "one")
    drafted = _finished(context, problems, "mtp")
    with pytest.raises(TrainingError if how == "fails" else ConfigError, match=message):
        chain.run_added_stages(context, problems, drafted, "mtp")
    assert not context.ledger.artifacts.list("derived")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('stages = ["pretraining", "reinforcement"]', "wanted pretraining first, then mtp"),
        ('stages = ["doubled", "pretraining", "mtp", "reinforcement"]', "wanted pretraining first"),
        (
            'stages = ["pretraining", "mtp", "doubled", "doubled", "reinforcement"]',
            "each stage once",
        ),
        ("settings.doubled.factor = 2", "wanted one of the added stages"),
        ("settings.mtp.depth = 2", "the recipe's section [[]mtp[]] holds its settings"),
    ],
)
def test_an_order_that_makes_no_chain_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "miniature"\nname = "mine"\n[pipeline]\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(path))


def test_added_stages_stand_between_shipped_ones() -> None:
    pipeline = PipelineConfig.model_construct(
        stages=("pretraining", "a", "b", "mtp", "reinforcement", "c")
    )
    added = {name: pipeline.added_after(name) for name in ("pretraining", "mtp", "reinforcement")}
    assert added == {"pretraining": ("a", "b"), "mtp": (), "reinforcement": ("c",)}
