"""Flow: collect, distil, train, evaluate, ship."""

from prefect import flow
from prefect.runtime import flow_run

from ostinato.flows.problem_building import problems_for
from ostinato.flows.reinforcement import reinforcement
from ostinato.flows.reporting import showing
from ostinato.flows.stages import realtime
from ostinato.flows.stages.forms import Budget, Checkpoint, Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext


@flow(name="realtime-cycle", flow_run_name=run_name)
def realtime_cycle(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    problems: ProblemSet = None,
    trained: Checkpoint | None = None,
    budget_seconds: Budget = None,
    options: Options = None,
) -> realtime.CycleReport:
    """Learns from users' interactions with the deployed checkpoint and ships the result if it is not worse.

    Args:
        budget_seconds: time from the cycle's opening to its gate's decision; a cycle that would exceed it
            trains on less; the recipe's cycle.deadline_seconds when absent.
        trained: checkpoint first offered to the recipe's serving line; made when absent.
    """
    budget = {"cycle.deadline_seconds": budget_seconds}
    context = StageContext.open(recipe, seed, options, changes=budget)
    realtime.serving_line(context)  # a recipe without a line fails here, before anything is trained
    context.recipe.cycle.gate.refuse_slices("the split of a cycle's gate", ())
    problems = problems_for(context, problems, recipe, seed)
    trained = context.checkpoint(trained) or reinforcement(
        recipe, seed, problems, options=context.options
    )
    # of the whole chain, where the cycle is part of one: a chain that starts again has new runs below it
    report = realtime.run_cycle(context, problems, trained, flow_run.root_flow_run_id or "")
    showing.show_cycle(report)
    return report
