"""Flow: solve rates of two agents that differ in code search alone."""

from prefect import flow

from ostinato.flows.continued_pretraining import continued_pretraining
from ostinato.flows.problem_building import problem_building
from ostinato.flows.recipe import SEARCH_ARMS
from ostinato.flows.reporting import showing
from ostinato.flows.stages import ablation_chain, chain
from ostinato.flows.stages.forms import RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.run_options import Options
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.evaluation.locating import ArmComparison


@flow(name="search-ablation", flow_run_name=run_name)
def search_ablation(
    recipe: RecipeName = "nano_search", seed: Seed = None, options: Options = None
) -> ArtifactRef:
    """Trains and evaluates both arms from one shared checkpoint. Returns the comparison.

    Args:
        recipe: what both arms share; their own recipes are called the same with _with and _without.
        seed: overrides the recipes' seed.
    """
    context = StageContext.open(recipe, seed, options)
    arms = {name: ablation_chain.open_arm(context, recipe, name) for name in SEARCH_ARMS}
    problems = problem_building(recipe, seed, options=context.options)
    start = continued_pretraining(recipe, seed, problems, options=context.options)
    rows: dict[str, ArtifactRef] = {}
    for name, arm in arms.items():
        checkpoint = chain.pretrain(arm, chain.build_corpus(arm, problems), start)
        rows[name] = ablation_chain.evaluate_arm(arm, problems, checkpoint)
    comparison = ablation_chain.compare(context, rows)
    showing.show_ablation(chain.result_of(context, comparison, ArmComparison))
    return comparison
