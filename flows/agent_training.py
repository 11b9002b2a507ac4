"""Flow: the whole chain from a recipe to a checkpoint and its report. A recipe with a serving line also promotes it."""

from prefect import flow

from ostinato.flows.continued_pretraining import continued_pretraining
from ostinato.flows.mtp_distillation import mtp_distillation
from ostinato.flows.problem_probing import problems_for_training
from ostinato.flows.realtime_cycle import realtime_cycle
from ostinato.flows.reinforcement import reinforcement
from ostinato.flows.reporting.run_report import RunArtifacts, show_run
from ostinato.flows.stages import chain, realtime
from ostinato.flows.stages.disk import refuse_small_disk
from ostinato.flows.stages.forms import Budget, Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext


@flow(name="agent-training", flow_run_name=run_name)
def agent_training(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    problems: ProblemSet = None,
    budget_seconds: Budget = None,
    options: Options = None,
) -> str:
    """Runs every stage that is not finished yet. Returns the path of the report.

    Args:
        budget_seconds: run time after which RL begins no further step; the recipe's
            reinforcement.budget_seconds when absent.
    """
    budget = {"reinforcement.budget_seconds": budget_seconds}
    context = StageContext.open(recipe, seed, options, changes=budget)
    if not context.runs_directory.exists():
        refuse_small_disk(context.recipe, context.settings.home, context.runs_directory)
    problems = problems_for_training(context, problems, recipe, seed)
    pretrained = continued_pretraining(recipe, seed, problems, options=context.options)
    drafted = mtp_distillation(recipe, seed, problems, pretrained, options=context.options)
    chain.evaluate_both(context, problems, drafted)
    reinforced = reinforcement(recipe, seed, problems, drafted, options=context.options)
    chain.evaluate_both(context, problems, reinforced)
    cycle = None
    if context.recipe.serving.line is not None:
        cycle = realtime.first_cycle(
            context,
            reinforced,
            lambda: realtime_cycle(recipe, seed, problems, reinforced, options=context.options),
        )
    made = RunArtifacts(problems, pretrained, drafted, reinforced)
    return str(show_run(context, made, cycle))
