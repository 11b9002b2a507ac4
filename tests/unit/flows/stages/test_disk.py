"""Disk is estimated from the recipe and refused before a stage that trains begins."""

import shutil
from pathlib import Path

import pytest

from ostinato.flows.agent_training import agent_training
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.disk import estimate_disk, refuse_small_disk
from ostinato.infra.platform.errors import ConfigError
from tests.fakes.finished_stages import open_context


def total(*overrides: str, recipe: str = "nano") -> int:
    return sum(estimate_disk(load_recipe(recipe, overrides=overrides)).values())


def test_more_of_what_is_kept_takes_more() -> None:
    assert 1.1e9 < total() < 5e9  # a seed of nano fills that, 0.6 GB of it step checkpoints
    few = "learning.keep_for_replay=false"
    assert total() > total(few, "learning.keep_checkpoints=5") > total(few)
    assert total("learning.keep_chain_versions=2", "learning.anchor_every_versions=3") < total()
    assert total(recipe="kimi_k2") > 100e12
    adapters = ("learning.lora.rank=8", "cycle.learning.lora.rank=8")
    assert total(*adapters) < total()  # they have a small optimiser
    untrained = load_recipe("smollm2_quick", overrides=("pretraining.phases=[]",))
    assert estimate_disk(untrained)["resume points of pretraining"] == 0


def test_a_recipe_larger_than_the_disk_is_refused_with_its_largest_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'kimi_k2' may fill \d+.* GB of it .* are free"):
        refuse_small_disk(load_recipe("kimi_k2"), tmp_path / "not" / "there", tmp_path / "run")


def test_what_a_run_has_filled_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = load_recipe("nano"), tmp_path / "runs" / "nano-seed0"
    chain = tmp_path / "objects" / "chains" / "chain-reinforced-1"
    for directory in (run / "reinforced-1" / "steps", chain):
        directory.mkdir(parents=True)
        (directory / "weights").write_bytes(bytes(1_000))

    def leave(free_bytes: int) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=free_bytes)
        monkeypatch.setattr("ostinato.flows.stages.disk.shutil.disk_usage", lambda _: usage)

    leave(total() - 2_000)
    refuse_small_disk(recipe, tmp_path, run)
    with pytest.raises(ConfigError, match="may fill"):
        refuse_small_disk(recipe, tmp_path, tmp_path / "runs" / "nano-seed1")
    monkeypatch.undo()
    leave(total() - 2_001)
    with pytest.raises(ConfigError, match="may fill"):
        refuse_small_disk(recipe, tmp_path, run)


def test_no_stage_of_such_a_recipe_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="may fill"):
        agent_training.fn("kimi_k2")
    assert not (tmp_path / "runs").exists()
    context = open_context(tmp_path, "mine", "[learning]\nkeep_for_replay = true\n")
    large = context.recipe.model.model_copy(update={"vocab_size": 10**11})
    object.__setattr__(context, "recipe", context.recipe.model_copy(update={"model": large}))
    with pytest.raises(ConfigError, match="may fill"):
        context.ensure("reinforcement", {}, (), lambda directory: (directory, {}))
    assert not context.runs_directory.exists()
    # what trains nothing is not asked
    context.ensure("problems", {}, (), lambda directory: (directory, {}))
