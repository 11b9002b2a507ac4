"""Flow: builds proven problems from real packages."""

from prefect import flow

from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import Options, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.problems.config import ProblemsResult


@flow(name="problem-building", flow_run_name=run_name)
def problem_building(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    options: Options = None,
    needs_all_splits: bool = False,
) -> ArtifactRef:
    """Builds, proves and splits the recipe's problems.

    Args:
        needs_all_splits: whether a split without problems is an error.
    """
    context = StageContext.open(recipe, seed, options)
    proven = chain.build_proven_problems(context)
    showing.show_problems(context, proven)
    sizes = chain.result_of(context, proven, ProblemsResult).split_sizes
    empty = [split for split, size in sizes.items() if not size]
    if empty and needs_all_splits:
        raise ProblemError(
            f"recipe {recipe}: no problem for {', '.join(empty)}; what was left out is listed above; "
            "take a larger source, more problems, or set those splits' [problems.sizes] to 0"
        )
    problems = chain.build_problems(context)
    if context.recipe.environments:
        showing.show_environments(context, problems)
    return problems


def problems_for(
    context: StageContext, given: ArtifactRef | str | None, recipe: str, seed: int | None
) -> ArtifactRef:
    """The problem set that a flow was given, else the recipe's, built when missing."""
    return context.problem_set(given) or problem_building(recipe, seed, options=context.options)
