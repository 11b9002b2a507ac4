"""Flow: a recipe's problems built anew and compared with the set that ships for them."""

from prefect import flow

from ostinato.flows.reporting import showing
from ostinato.flows.reporting.console import say
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.run_options import Options
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.problem_sets import PROBLEMS_FILE
from ostinato.tasks.problems.config import ProblemsResult
from ostinato.tasks.problems.shipped import compare_with_shipped, find_set, ship_set


@flow(name="problem-verification", flow_run_name=run_name)
def problem_verification(
    recipe: RecipeName = "problems_16", seed: Seed = None, options: Options = None
) -> ArtifactRef:
    """Proves the recipe's problems again: equal bytes, or ProblemError. Where no set ships for the
    recipe, the one just built is put into tasks/problems/sets for a commit.
    """
    context = StageContext.open(recipe, seed, options)
    problems = chain.build_proven_problems(context, use_shipped=False)
    showing.show_problems(context, problems)
    directory, config = context.directory_of(problems), context.recipe.problems
    shipped = find_set(config)
    if shipped is None:
        result = chain.result_of(context, problems, ProblemsResult)
        result = result.model_copy(update={"directory": str(directory)})
        card = ship_set(context.recipe.name, config, result)
        say(f"tasks/problems/sets now holds {context.recipe.name}: sha256 {card.sha256}")
        return problems
    differences = compare_with_shipped((directory / PROBLEMS_FILE).read_bytes(), shipped[1])
    if differences:
        raise ProblemError(f"recipe {recipe}: " + "\n".join(differences))
    say(f"equal to the shipped set, byte for byte: sha256 {shipped[0].sha256}")
    return problems
