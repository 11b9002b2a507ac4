"""Flow: real packages in, proven problems out."""

from prefect import flow

from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import RunOptions, StageContext
from ostinato.infra.platform.artifacts import ArtifactRef


@flow(name="problem-building", flow_run_name=run_name)
def problem_building(
    recipe: RecipeName = "nano", seed: Seed = None, options: RunOptions | None = None
) -> ArtifactRef:
    """Builds, proves and splits the recipe's problems.

    Args:
        recipe: name of a shipped recipe or path of a TOML file.
        seed: overrides the recipe's seed.
        options: overridden settings, stages to keep or to build again.
    """
    context = StageContext.open(recipe, seed, options)
    showing.show_problems(context, chain.build_proven_problems(context))
    problems = chain.build_problems(context)
    if context.recipe.environments:
        showing.show_environments(context, problems)
    return problems
