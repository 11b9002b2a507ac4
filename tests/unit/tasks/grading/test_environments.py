"""Environments of verifiers without the package: one clear error, when a recipe is read."""

from pathlib import Path

import pytest

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.plugins import verifiers_module

RECIPE = 'extends = "miniature"\nname = "mine"\n'


@pytest.mark.parametrize(
    "text",
    ['environments = ["verifiers:wordle"]\n', '[environments."verifiers:wordle"]\ntrain = 3\n'],
)
def test_a_recipe_says_what_to_install(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE + text)
    with pytest.raises(ConfigError, match=r"verifiers <0.4,>=0.3.1, found none: pip install"):
        load_recipe(str(recipe))


def test_a_family_that_nothing_provides_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE + 'environments = ["gymnasium:CartPole-v1"]\n')
    with pytest.raises(ConfigError, match="'gymnasium:CartPole-v1', wanted one of"):
        load_recipe(str(recipe))


def test_names_of_the_hub_become_modules() -> None:
    assert verifiers_module("verifiers:primeintellect/word-game") == "word_game"
