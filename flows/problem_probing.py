"""Flow: measures how often a checkpoint solves each training problem. Trains nothing."""

from typing import Annotated

from prefect import flow
from pydantic import Field

from ostinato.flows.problem_building import problems_for
from ostinato.flows.reporting import showing
from ostinato.flows.stages import probing
from ostinato.flows.stages.checkpoints import NEWEST
from ostinato.flows.stages.forms import CheckpointName, Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.rollout.config import PROBE_ATTEMPTS


@flow(name="problem-probing", flow_run_name=run_name)
def problem_probing(
    recipe: RecipeName = "nano",
    seed: Seed = None,
    checkpoint: CheckpointName = NEWEST,
    attempts: Annotated[int, Field(ge=1, title="Attempts")] = PROBE_ATTEMPTS,
    problems: ProblemSet = None,
    options: Options = None,
) -> ArtifactRef:
    """Lets a checkpoint attempt each training problem as in rollouts, and shows how many it solves how often. The
    result is an artifact for the setting `probes` of `[rollout.curriculum]`.

    Args:
        checkpoint: champion, newest (the recipe's), or kind/name@version.
        attempts: attempts at each problem.
    """
    context = StageContext.open(recipe, seed, options, may_train=False)
    attempted = context.checkpoint_named(checkpoint)
    problems = problems_for(context, problems, recipe, seed)
    probes = probing.probe(context, problems, attempted, attempts)
    showing.show_probes(context, probes)
    return probes


def problems_for_training(
    context: StageContext, given: ArtifactRef | str | None, recipe: str, seed: int | None
) -> ArtifactRef:
    """As `problems_for`, but raises ConfigError if the probes that the recipe names are missing or of another set."""
    probes = probing.named_probes(context)
    problems = problems_for(context, given, recipe, seed)
    if probes is not None:
        probing.refuse_other_set(context, probes, problems)
    return problems
