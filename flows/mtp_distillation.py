"""Flow: distils draft layers to match the main head, and measures their speed-up."""

from prefect import flow

from ostinato.flows.continued_pretraining import continued_pretraining
from ostinato.flows.problem_building import problems_for
from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import Checkpoint, Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef


@flow(name="mtp-distillation", flow_run_name=run_name)
def mtp_distillation(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    problems: ProblemSet = None,
    pretrained: Checkpoint | None = None,
    options: Options = None,
) -> ArtifactRef:
    """Distils draft layers, unless they were trained with the trunk, and measures them. Returns the
    checkpoint with both, or the trunk alone when the recipe has no draft layers.

    Args:
        pretrained: the trunk; trained when absent.
    """
    context = StageContext.open(recipe, seed, options)
    problems = problems_for(context, problems, recipe, seed)
    pretrained = context.checkpoint(pretrained) or continued_pretraining(
        recipe, seed, problems, options=context.options
    )
    if not context.recipe.mtp.depth:
        return chain.run_added_stages(context, problems, pretrained, "mtp")
    corpus = chain.build_corpus(context, problems)
    drafted = pretrained
    if context.parent_of(pretrained, "mtp") is None:  # else they were trained with the trunk
        drafted = chain.distil_draft_layers(context, corpus, pretrained)
    speculation = chain.measure_speculation(context, corpus, drafted)
    showing.show_drafting(context, drafted, speculation)
    return chain.run_added_stages(context, problems, drafted, "mtp")
