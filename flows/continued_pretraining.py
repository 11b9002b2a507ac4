"""Flow: builds the corpus, pretrains (bulk, then long context), then fine-tunes on agent transcripts."""

from prefect import flow

from ostinato.flows.problem_building import problems_for
from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef


@flow(name="continued-pretraining", flow_run_name=run_name)
def continued_pretraining(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    problems: ProblemSet = None,
    options: Options = None,
) -> ArtifactRef:
    """Continues training the recipe's base checkpoint. Returns the fine-tuned checkpoint."""
    context = StageContext.open(recipe, seed, options)
    problems = problems_for(context, problems, recipe, seed)
    corpus = chain.build_corpus(context, problems)
    pretrained = chain.pretrain(context, corpus)
    showing.show_pretraining(context, corpus, pretrained)
    return chain.run_added_stages(context, problems, pretrained, "pretraining")
