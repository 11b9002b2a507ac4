"""Flow: solve rates of two agents that differ in code search alone."""

from prefect import flow

from flows import ablation_chain, showing
from flows.continued_pretraining import continued_pretraining
from flows.problem_building import problem_building
from flows.recipe import load_recipe
from flows.stage import StageContext
from infra.artifacts import ArtifactRef


@flow(name="search-ablation")
def search_ablation(recipe: str = "nano_search", seed: int | None = None) -> ArtifactRef:
    """Trains and evaluates both arms from one shared checkpoint, and that checkpoint behind either
    arm's scripted locating; returns the comparisons.

    Args:
        recipe: what both arms share; their own recipes are called the same with _with and _without.
        seed: overrides the recipes' seed.
    """
    context = StageContext.open(load_recipe(recipe, seed=seed))
    problems = problem_building(recipe, seed)
    start = continued_pretraining(recipe, seed, problems)
    encoder = ablation_chain.train_encoder(context)
    named = ablation_chain.evaluate_named(context, problems, start)
    scripted: dict[str, ArtifactRef] = {}
    trained: dict[str, ArtifactRef] = {}
    for name in ablation_chain.ARMS:
        arm = ablation_chain.open_arm(context, recipe, name)
        scripted[name] = ablation_chain.locate_by_script(arm, problems, encoder, start, named)
        checkpoint = ablation_chain.train_arm(arm, problems, encoder, start)
        trained[name] = ablation_chain.evaluate_arm(arm, problems, encoder, checkpoint)
    comparison = ablation_chain.compare(context, scripted, trained)
    showing.show_ablation(ablation_chain.read_comparisons(context, comparison))
    return comparison
