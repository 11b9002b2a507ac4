"""Changes to a recipe by section, as a form sends them."""

from typing import Any

import pytest
from pydantic import ValidationError

from ostinato.flows.recipe import load_recipe, recipe_names
from ostinato.flows.stages.forms import RunOptions

CHANGES: dict[str, Any] = {
    "rollout": {"group_size": 3},
    "cycle": {"simulated_users": None, "gate": {"floor": 0.25}},
}


def test_changes_go_over_the_recipe_and_nothing_else_moves() -> None:
    options = RunOptions.model_validate({"changes": CHANGES, "overrides": ["rollout.group_size=4"]})
    again = RunOptions.model_validate_json(options.model_dump_json())
    assert again.changes.model_dump(mode="json") == CHANGES
    plain = load_recipe("nano")
    changed = load_recipe("nano", overrides=again.overrides, changes=CHANGES)
    assert plain.cycle.simulated_users is not None
    gate = plain.cycle.gate.model_copy(update={"floor": 0.25})
    cycle = plain.cycle.model_copy(update={"simulated_users": None, "gate": gate})
    rollout = plain.rollout.model_copy(update={"group_size": 4})
    assert changed == plain.model_copy(update={"cycle": cycle, "rollout": rollout})


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_laid_over_itself_is_itself(name: str) -> None:
    recipe = load_recipe(name)
    whole = RunOptions.model_validate({"changes": recipe.model_dump(mode="json")})
    assert load_recipe(name, changes=whole.changes.model_dump(mode="json")) == recipe


def test_options_without_changes_leave_the_recipe_as_it_is() -> None:
    changes = RunOptions.model_validate_json(RunOptions().model_dump_json()).changes
    assert changes.model_dump(mode="json") == {}
    assert load_recipe("nano", changes=changes.model_dump(mode="json")) == load_recipe("nano")


def test_seed_of_a_section_that_is_changed_stays_beside_a_seed_of_the_run() -> None:
    recipe = load_recipe("nano", seed=5, changes={"pretraining": {"seed": 3}})
    assert (recipe.pretraining.seed, recipe.mtp.seed) == (3, 5)


def test_null_in_a_setting_of_the_command_line_removes_a_table() -> None:
    assert (
        load_recipe("nano", overrides=["cycle.simulated_users=null"]).cycle.simulated_users is None
    )


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"rollout": {"group_sise": 3}}, "changes.rollout.group_sise"),
        ({"rolout": {}}, "changes.rolout"),
        ({"rollout": None}, "changes.rollout"),
        ({"cycle": {"gate": {"floor": 7}}}, "changes.cycle.gate.floor"),
    ],
)
def test_unknown_section_key_or_value_is_refused(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=place):
        RunOptions.model_validate({"changes": changes})
