"""Verification of problem sets for real on two small packages, for which no set ships."""

from pathlib import Path

import pytest

from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.problems.shipped import find_set
from tests.benchmarks.problem_verification import verify
from tests.fakes.repositories import TWO_PACKAGES, write_archives

RECIPE = """
extends = "miniature"
name = "small"

[problems.sizes]
demonstration = 6
train = 0
held_out = 4
held_out_function = 0
user = 0
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_set_that_does_not_ship_is_compared_with_the_one_in_use(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    write_archives(home / "cache" / "archives")
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE + TWO_PACKAGES)

    assert verify(str(recipe)).startswith("all problems of problems/small@1 were made again")

    context = StageContext.open(str(recipe))
    first = context.directory_of(context.artifacts.get("problems/small@1")) / PROBLEMS_FILE
    verify(str(recipe), ships=True, folder=tmp_path / "sets")
    found = find_set(context.recipe.problems, tmp_path / "sets")
    assert found is not None
    assert found[1] == first.read_bytes()


def test_a_second_set_for_a_recipe_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="holds a set for it already"):
        verify("problems_16", ships=True)
