"""Settings of a run as a form sends them: the common ones by name, the others in TOML."""

from typing import Any

import pytest
from pydantic import ValidationError

from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.forms import RunOptions
from ostinato.infra.platform.errors import ConfigError

FURTHER = """
mtp.depth = 2
[rollout]
group_size = 3
temperature = 0.5
[cycle.gate]
floor = 0.25
"""


def test_settings_go_over_the_recipe_and_nothing_else_moves() -> None:
    options = RunOptions(
        settings=FURTHER,
        overrides=(
            "cycle.simulated_users=null",
            "rollout.temperature=0.75",
            "rollout.group_size=5",
        ),
        group_size=4,
        learning_rate=1e-4,
        max_steps=7,
        serving_line="other",
        promote=True,
    )
    again = RunOptions.model_validate_json(options.model_dump_json())
    by_lines = load_recipe(
        "nano",
        overrides=[
            "mtp.depth=2", "rollout.group_size=4", "rollout.temperature=0.75", "cycle.gate.floor=0.25",
            "cycle.simulated_users=null", "learning.optimizer.learning_rate=1e-4",
            "reinforcement.max_steps=7", 'serving.line="other"', "serving.promote_evaluated=true",
        ],
    )  # fmt: skip
    assert again.recipe_of("nano") == by_lines


def test_options_without_settings_leave_the_recipe_as_it_is() -> None:
    assert RunOptions().recipe_of("nano", seed=3) == load_recipe("nano", seed=3)


def test_seed_of_a_section_that_is_set_stays_beside_a_seed_of_the_run() -> None:
    recipe = RunOptions(settings="pretraining.seed = 3").recipe_of("nano", seed=5)
    assert (recipe.pretraining.seed, recipe.mtp.seed) == (3, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group_sise": 3}, "group_sise"),
        ({"group_size": 1}, "group_size"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"serving_line": "Two words"}, "serving_line"),
        ({"settings": "rollout.group_size ="}, "not TOML"),
        ({"settings": "a = " + "[" * 5_000}, "nested too deep"),
        ({"keep": ["nothing"]}, "no stage 'nothing'"),
    ],
)
def test_what_a_form_cannot_mean_is_refused_by_its_field(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        RunOptions.model_validate(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout.group_sise = 3", "rollout.group_sise: unknown key; did you mean 'group_size'"),
        ("[rolout]", "rolout: unknown key"),
        ("rollout = 3", "rollout"),
        ("cycle.gate.floor = 7", "cycle.gate.floor"),
    ],
)
def test_settings_have_the_messages_of_a_recipe_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunOptions(settings=text).recipe_of("nano")
