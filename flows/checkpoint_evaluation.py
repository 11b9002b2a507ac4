"""Flow: held-out problems for a checkpoint, and the gate; ends Failed when the gate fails."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from ostinato.flows import chain, realtime, showing
from ostinato.flows.naming import run_name
from ostinato.flows.problem_building import problem_building
from ostinato.flows.reinforcement import reinforcement
from ostinato.flows.stage import RunOptions, StageContext
from ostinato.infra.platform.artifacts import ArtifactRef


@flow(name="checkpoint-evaluation", flow_run_name=run_name)
def checkpoint_evaluation(
    recipe: str = "nano",
    seed: int | None = None,
    problems: ArtifactRef | None = None,
    checkpoint: ArtifactRef | None = None,
    options: RunOptions | None = None,
) -> State:
    """Scores a checkpoint on both held-out splits and holds it against the serving one.

    Args:
        recipe: name of a shipped recipe or path of a TOML file.
        seed: overrides the recipe's seed.
        problems: a built problem set; built when absent.
        checkpoint: what to score; the recipe's newest when absent.
        options: overridden settings, stages to keep or to build again.
    """
    context = StageContext.open(recipe, seed, options)
    problems = problems or problem_building(recipe, seed, options=context.options)
    checkpoint = checkpoint or reinforcement(recipe, seed, problems, options=context.options)
    card, hard = chain.evaluate_both(context, problems, checkpoint)
    decision = realtime.judge_against_champion(context, problems, card)
    showing.show_scorecards((card, hard), decision)
    return (
        Completed(message=decision.reason) if decision.passed else Failed(message=decision.reason)
    )
