"""A recipe whose line serves people has a canary unless it says otherwise."""

from pathlib import Path

import pytest

from ostinato.flows.recipe import load_recipe, recipe_names
from ostinato.tasks.realtime.config import CanaryConfig, CycleConfig


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_that_serves_people_has_a_canary(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.cycle.people_canary is None) == (recipe.cycle.simulated_users is not None)
    for people in (
        load_recipe(name, overrides=["cycle.simulated_users=null"]),
        recipe.with_({"cycle.simulated_users": None}),
        load_recipe(name, changes={"cycle": {"simulated_users": False}}),
    ):
        assert people.cycle.people_canary == CanaryConfig()
    for nobody in (
        load_recipe(name, overrides=["cycle.simulated_users=null", "cycle.canary=false"]),
        recipe.with_({"cycle.simulated_users": None, "cycle.canary": False}),
    ):
        assert nobody.cycle.people_canary is None


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("[cycle]\nsimulated_users = false", 0.2),
        ("[cycle]\nsimulated_users = false\ncanary = false", None),
        ("[cycle.canary]\nshare = 0.1", 0.1),
        ("[cycle]\ncanary = false", None),
        ("", None),
    ],
)
def test_false_removes_a_table_that_a_recipe_inherits(
    text: str, share: float | None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "nano"\nname = "mine"\n{text}\n')
    canary = load_recipe(str(path)).cycle.people_canary
    assert (None if canary is None else canary.share) == share


def test_what_a_recipe_has_is_what_its_record_has() -> None:
    for cycle in (CycleConfig(), CycleConfig(canary=False), load_recipe("nano").cycle):
        assert CycleConfig.model_validate(cycle.model_dump()) == cycle
        assert CycleConfig.model_validate_json(cycle.model_dump_json()) == cycle
