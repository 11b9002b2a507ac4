"""Flow: asynchronous GRPO in sandboxes with real tests as reward."""

from prefect import flow

from ostinato.flows.mtp_distillation import mtp_distillation
from ostinato.flows.problem_building import problem_building
from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import Artifact, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import RunOptions, StageContext
from ostinato.infra.platform.artifacts import ArtifactRef


@flow(name="reinforcement", flow_run_name=run_name)
def reinforcement(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    problems: Artifact | None = None,
    start: Artifact | None = None,
    options: RunOptions | None = None,
) -> ArtifactRef:
    """Runs RL from a fine-tuned checkpoint. Returns the checkpoint after it.

    Args:
        recipe: name of a shipped recipe or path of a TOML file.
        seed: overrides the recipe's seed.
        problems: a built problem set; built when absent.
        start: the checkpoint to begin with; made when absent.
        options: overridden settings, stages to keep or to build again.
    """
    context = StageContext.open(recipe, seed, options)
    problems = context.named(problems) or problem_building(recipe, seed, options=context.options)
    start = context.named(start) or mtp_distillation(
        recipe, seed, problems, options=context.options
    )
    reinforced = chain.reinforce(context, problems, start)
    showing.show_reinforcement(context, reinforced)
    return reinforced
