"""`import ostinato`: runs, curves, attempts and checkpoints as a program gets them."""

import subprocess
import sys
from pathlib import Path

import pytest

import ostinato
from ostinato.flows.commands.launching import FlowFailed
from ostinato.flows.recipe import recipe_names
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import save_checkpoint
from tests.fakes.finished_stages import add_checkpoint, add_problems, open_context
from tests.fakes.tiny_model import TINY, random_weights
from tests.fakes.toy_gateway import make_renderer
from tests.fakes.trained_home import NUM_STEPS, add_attempts, fill_home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ostinato.Home:
    """A home with a finished RL run of two attempts."""
    fill_home(Settings(home=tmp_path / "home"))
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    add_attempts(Settings(home=tmp_path / "home"))
    return ostinato.open()


def test_a_run_has_a_row_per_step_and_its_attempts(home: ostinato.Home) -> None:
    run = home.run("toy-seed0")
    assert [run] == home.runs
    assert run == home.run("reinforced-bb") == home.run(str(run.directory))
    steps = run.metrics()
    assert list(steps.index) == list(range(1, NUM_STEPS + 1))
    assert steps["solve_rate"].is_monotonic_increasing
    assert steps["entropy_nats"].isna().all()
    solved = run.attempts(solved=True)
    assert [it.facts["trajectory_id"] for it in solved] == ["reinforced-bb.g0.t0"]
    assert [it.reward for it in run.attempts()] == [1.0, 0.0]
    assert {it.is_solved for it in run.attempts(solved=False)} == {False}


def test_a_checkpoint_has_its_lineage(home: ostinato.Home, tmp_path: Path) -> None:
    context = open_context(tmp_path, "toy")
    first = add_checkpoint(context, add_problems(context, "set"), "first")
    second = add_checkpoint(context, first, "second")
    assert [str(it) for it in home.checkpoints] == [str(first), str(second)]
    found = home.checkpoint(str(second)).lineage()
    assert [it.artifact for it in found.parents] == [str(first)]


@pytest.mark.slow
async def test_a_checkpoint_continues_a_text_also_beside_a_running_event_loop(
    home: ostinato.Home, tmp_path: Path
) -> None:
    renderer = make_renderer()
    spec = TINY.model_copy(update={"vocab_size": renderer.vocab_size, "max_sequence_tokens": 160})
    tokenizer = renderer.save(tmp_path / "tokenizer")

    def build(directory: Path) -> tuple[Path, dict]:
        weights = random_weights(spec, seed=1)
        return save_checkpoint(directory / "made", spec, weights, tokenizer_path=tokenizer), {}

    made = open_context(tmp_path, "toy").ensure("reinforcement", {"random": 1}, (), build)
    checkpoint = home.checkpoint(str(made))
    text = checkpoint.generate("def one():", max_new_tokens=12)
    assert 0 < len(renderer.encode_content(text)) <= 12
    assert checkpoint.generate("def one():", max_new_tokens=12) == text
    drawn = {checkpoint.generate("def one():", temperature=1.0, seed=seed) for seed in range(3)}
    assert len(drawn) > 1


def test_a_home_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "another"))
    assert ostinato.open(tmp_path).settings.home == tmp_path
    assert ostinato.open(tmp_path).runs == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        ostinato.open(tmp_path / "file")


def test_unknown_names_are_refused_with_the_known_ones(home: ostinato.Home) -> None:
    with pytest.raises(ConfigError, match=r"wanted one of toy-seed0 \(reinforced-bb\)"):
        home.run("toy-seed1")
    with pytest.raises(ConfigError, match="not in the ledger"):
        home.checkpoint("reinforced/toy@7")
    with pytest.raises(ConfigError, match="no flow named demos"):
        home.start("nano", "demos")
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = ostinato.Trainer


@pytest.mark.parametrize("name", recipe_names())
def test_a_changed_recipe_is_written_as_it_is(home: ostinato.Home, name: str) -> None:
    recipe = ostinato.Recipe.load(name).with_({"rollout.group_size": 4, "name": "mine"})
    assert recipe.rollout.group_size == 4
    assert recipe.with_({"rollout.group_size": 8, "name": name}).rollout.group_size == 8
    assert ostinato.Recipe.load(home._place_of(recipe)) == recipe
    without = recipe.with_({"cycle.simulated_users": None})
    assert ostinato.Recipe.load(home._place_of(without)) == without


def test_a_wrong_setting_is_named_as_in_a_recipe_file() -> None:
    recipe = ostinato.Recipe.load("nano")
    assert recipe.with_({"cycle.simulated_users": None}).cycle.simulated_users is None
    for changes, message in (
        ({"rollout.group_sise": 3}, "did you mean 'group_size'"),
        ({"rollout.group_size": 1}, "rollout.group_size = 1"),
        ({"seed.rollout": 1}, "seed is 0, wanted a section"),
        ({"learning.optimizer.learning_rate": float("nan")}, "wanted a finite number"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe.with_(changes)


@pytest.mark.slow
def test_a_failed_flow_raises_with_its_exit_code(home: ostinato.Home) -> None:
    with pytest.raises(FlowFailed) as caught:
        home.start("miniature", "sft", parameters={"data": "/nowhere.jsonl"})
    assert caught.value.code == 2


def test_import_of_the_package_imports_no_stage() -> None:
    program = "import sys, ostinato; print([m for m in sys.modules if m.startswith('ostinato.')])"
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr
