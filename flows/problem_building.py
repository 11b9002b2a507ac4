"""Flow: real packages in, proven problems out."""

from prefect import flow

from flows import chain, showing
from flows.recipe import load_recipe
from flows.stage import StageContext
from infra.artifacts import ArtifactRef


@flow(name="problem-building")
def problem_building(recipe: str = "nano", seed: int | None = None) -> ArtifactRef:
    """Builds, proves and splits the recipe's problems.

    Args:
        recipe: name of a shipped recipe or path of a TOML file.
        seed: overrides the recipe's seed.
    """
    context = StageContext.open(load_recipe(recipe, seed=seed))
    problems = chain.build_problems(context)
    showing.show_problems(context, problems)
    return problems
