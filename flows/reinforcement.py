"""Flow: asynchronous GRPO in sandboxes with real tests as reward."""

from prefect import flow

from ostinato.flows.mtp_distillation import mtp_distillation
from ostinato.flows.problem_probing import problems_for_training
from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain, probing
from ostinato.flows.stages.forms import Budget, Checkpoint, Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef


@flow(name="reinforcement", flow_run_name=run_name)
def reinforcement(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    problems: ProblemSet = None,
    start: Checkpoint | None = None,
    budget_seconds: Budget = None,
    options: Options = None,
) -> ArtifactRef:
    """Runs RL from a fine-tuned checkpoint. Returns the trained checkpoint.

    Args:
        start: the checkpoint to begin with; made when absent.
        budget_seconds: run time after which no further step begins; the recipe's
            reinforcement.budget_seconds when absent.
    """
    budget = {"reinforcement.budget_seconds": budget_seconds}
    context = StageContext.open(recipe, seed, options, changes=budget)
    problems = problems_for_training(context, problems, recipe, seed)
    start = context.checkpoint(start) or mtp_distillation(
        recipe, seed, problems, options=context.options
    )
    probes = probing.probes_for(context, problems, start)
    reinforced = chain.reinforce(context, problems, start, probes)
    showing.show_reinforcement(context, reinforced)
    return chain.run_added_stages(context, problems, reinforced, "reinforcement")
