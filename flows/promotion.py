"""Flow: offers a checkpoint to the recipe's serving line, which promotes it when its gate passes."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from ostinato.flows.commands.run_flow import GATE_FAILED
from ostinato.flows.problem_building import problems_for
from ostinato.flows.stages import realtime
from ostinato.flows.stages.artifacts import show_markdown
from ostinato.flows.stages.checkpoints import NEWEST
from ostinato.flows.stages.forms import CheckpointName, Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.tasks.realtime.promotion.serving_line import PromotionOutcome


@flow(name="promotion", flow_run_name=run_name)
def promotion(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    checkpoint: CheckpointName = NEWEST,
    problems: ProblemSet = None,
    directly: bool = True,
    options: Options = None,
) -> State:
    """Promotes a checkpoint if it passes the gate against the champion. Trains nothing. Ends Failed when
    the gate refuses it. Started by hand, or by an evaluation of a recipe with `serving.promote_evaluated`.

    Args:
        checkpoint: newest (the recipe's), or kind/name@version.
        directly: serves all users at once, without the recipe's canary.
    """
    context = StageContext.open(recipe, seed, options, may_train=False)
    offered = context.checkpoint_named(checkpoint)
    problems = problems_for(context, problems, recipe, seed)
    report = realtime.offer(context, problems, offered, directly=directly)
    text = (
        f"**{report.outcome.value}**: {report.candidate}; {report.champion} serves. {report.reason}"
    )
    show_markdown(text, key="promotion", description=report.line)
    if report.outcome is PromotionOutcome.REFUSED:
        return Failed(name=GATE_FAILED, message=report.reason)
    return Completed(message=report.reason)
