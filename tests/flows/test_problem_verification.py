"""The verification flow for real on two small packages, for which no set ships."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.problem_verification import problem_verification
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.problems.shipped import SETS, find_set
from tests.fakes.project_copy import ProjectCopy
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
def test_a_set_that_does_not_ship_is_compared_with_the_one_in_use(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    write_archives(home / "cache" / "archives")
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE + TWO_PACKAGES)
    shipped = sorted(SETS.iterdir())

    again = problem_verification(str(recipe))

    context = StageContext.open(str(recipe))
    first = context.artifacts.get("problems/small@1")
    assert again != first
    proven, used = (context.directory_of(ref) / PROBLEMS_FILE for ref in (again, first))
    assert proven.read_bytes() == used.read_bytes()
    assert sorted(SETS.iterdir()) == shipped

    project = ProjectCopy(tmp_path / "project", home)
    project.run("run", "problem-verification", "--recipe", str(recipe), "--ship")
    found = find_set(context.recipe.problems, project.package / "tasks/problems/sets")
    assert found is not None
    assert found[1] == proven.read_bytes()
    assert sorted(SETS.iterdir()) == shipped


def test_a_second_set_for_a_recipe_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="holds a set for it already"):
        problem_verification.fn("problems_16", ships=True)


def test_shipping_goes_with_verification_alone(home: Path) -> None:
    found = CliRunner().invoke(app, ["run", "sft", "--data", __file__, "--ship"])
    assert found.exit_code == 2
    assert "--ship goes with problem-verification" in found.output
    assert not (home / "prefect").exists()
