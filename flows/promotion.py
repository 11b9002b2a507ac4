"""Flow: a checkpoint before the gate of the recipe's serving line, and before users when it passes."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from ostinato.flows.commands.run_flow import GATE_FAILED
from ostinato.flows.problem_building import problem_building
from ostinato.flows.stages import realtime
from ostinato.flows.stages.artifacts import show_markdown
from ostinato.flows.stages.checkpoints import NEWEST, checkpoint_named
from ostinato.flows.stages.forms import CheckpointName, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.run_options import Options
from ostinato.flows.stages.stage import StageContext
from ostinato.tasks.promotion.serving_line import PromotionOutcome


@flow(name="promotion", flow_run_name=run_name)
def promotion(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    checkpoint: CheckpointName = NEWEST,
    options: Options = None,
) -> State:
    """Promotes a checkpoint that passes the gate against the champion. Trains nothing. Ends Failed
    when the gate refuses.

    Args:
        checkpoint: newest (the recipe's), or kind/name@version.
    """
    context = StageContext.open(recipe, seed, options, may_train=False)
    offered = checkpoint_named(context.recipe, context.ledger, context.artifacts, checkpoint)
    problems = problem_building(recipe, seed, options=context.options)
    report = realtime.offer(context, problems, offered)
    text = (
        f"**{report.outcome.value}**: {report.candidate}; {report.champion} serves. {report.reason}"
    )
    show_markdown(text, key="promotion", description=report.line)
    if report.outcome is PromotionOutcome.REFUSED:
        return Failed(name=GATE_FAILED, message=report.reason)
    return Completed(message=report.reason)
