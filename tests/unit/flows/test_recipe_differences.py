"""Recipes are compared by key, whether they are given by name, by path or by a run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.commands.recipe_commands import recipes
from ostinato.flows.recipe import load_recipe
from ostinato.flows.recipe_differences import NOT_THERE, RECIPE_FILE, differences, settings_of
from ostinato.infra.platform.errors import ConfigError


def test_a_name_a_path_and_a_run_of_one_recipe_are_the_same(tmp_path: Path) -> None:
    run, file = tmp_path / "runs/nano-seed0/reinforced-0", tmp_path / "own.toml"
    run.mkdir(parents=True)
    (run / RECIPE_FILE).write_text(load_recipe("nano").model_dump_json())
    file.write_text('extends = "nano"\n[rollout]\ngroup_size = 3\n[serving]\nline = "nano"\n')
    shipped = settings_of("nano", tmp_path)
    assert differences(shipped, settings_of("nano-seed0/reinforced-0", tmp_path)) == {}
    changed = differences(shipped, settings_of(str(file), tmp_path))
    assert changed == {"rollout.group_size": (shipped["rollout.group_size"], 3)}


def test_a_key_that_one_side_lacks_is_not_there() -> None:
    assert differences({"a": 1, "c": None}, {"a": 1, "b": 2}) == {
        "b": (NOT_THERE, 2),
        "c": (None, NOT_THERE),
    }


@pytest.mark.parametrize("name", ["nano-seed0/none", "a" * 5_000, "a\0b"])
def test_what_is_neither_recipe_nor_run_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found, wanted one of"):
        settings_of(name, tmp_path)


def test_the_command_prints_each_key_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    said = CliRunner().invoke(recipes, ["diff", "nano", "nano"], catch_exceptions=False)
    assert said.stdout == "0 settings differ: nano, nano\n"
    told = CliRunner().invoke(recipes, ["diff", "nano", "nano_long", "--json"])
    found = json.loads(told.stdout)
    assert found["name"] == ["nano", "nano_long"]
    assert "harness.dialect" not in found
