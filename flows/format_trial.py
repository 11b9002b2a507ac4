"""Flow: the tool-call dialects and edit forms that a model can write, each on the same problems. Trains nothing."""

from collections.abc import Sequence
from typing import get_args

from prefect import flow

from ostinato.flows.problem_building import problems_for
from ostinato.flows.stages import chain
from ostinato.flows.stages.artifacts import show_markdown, show_table
from ostinato.flows.stages.checkpoints import checkpoint_named
from ostinato.flows.stages.console import say
from ostinato.flows.stages.declared import FORMAT_TRIAL
from ostinato.flows.stages.forms import CheckpointName, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.run_options import Options
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.agent.config import EditForm
from ostinato.infra.agent.dialects.published.choice import read_choice
from ostinato.infra.agent.extensions import COMPACT, DIALECTS
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.tasks.evaluation.formats.config import AnswerFormat, FormatTrialResult


@flow(name="format-trial", flow_run_name=run_name)
def format_trial(
    recipe: RecipeName = "short_repairs",
    seed: Seed = None,
    checkpoint: CheckpointName = "",
    dialects: Sequence[str] = (),
    problems: ProblemSet = None,
    options: Options = None,
) -> ArtifactRef:
    """Tries an imported model in each format on training problems, shows a table, and recommends one.

    Args:
        recipe: name of a shipped recipe or path of a TOML file; its problems, harness and [format_trial].
        checkpoint: an imported model, or one trained from it: kind/name@version.
        dialects: tool-call dialects beside the one that `ostinato import` chose.
    """
    if not checkpoint:
        raise ConfigError(
            "checkpoint is empty, wanted an imported one, such as checkpoint/smollm2@1"
        )
    with boundary(ConfigError, "dialects"):
        DIALECTS.refuse_unknown(dialects)
    context = StageContext.open(recipe, seed, options, may_train=False)
    chosen = checkpoint_named(context.recipe, context.ledger, context.artifacts, checkpoint)
    directory = context.directory_of(chosen)
    if not chain.is_imported(directory):
        raise ConfigError(
            f"checkpoint {chosen} was trained in the {COMPACT} dialect, wanted an imported model"
        )
    made = context.make(
        FORMAT_TRIAL,
        {"problems": problems_for(context, problems, recipe, seed), "checkpoint": chosen},
        title=f"formats of {chosen}",
        formats=formats_to_try(read_choice(directory), dialects),
        harness=chain.harness_for(context.recipe, directory),
        sandbox=context.recipe.rollout.sandbox,
        processes=context.settings.cpu_limit,
    )
    show_formats(str(chosen), chain.result_of(context, made, FormatTrialResult))
    return made


def formats_to_try(chosen: str, others: Sequence[str]) -> tuple[AnswerFormat, ...]:
    """Edits by tool in every dialect; edits in a plain answer in the chosen one, as they are no calls."""
    dialects = dict.fromkeys((chosen, *others))
    in_answers = [edits for edits in get_args(EditForm) if edits != "tool"]
    return (
        *(AnswerFormat(dialect=dialect) for dialect in dialects),
        *(AnswerFormat(dialect=chosen, edits=edits) for edits in in_answers),
    )


def show_formats(checkpoint: str, result: FormatTrialResult) -> None:
    """A row per format, attempts to read, and the recommended format as recipe text."""
    rows = [
        {
            "dialect": score.format.dialect,
            "edits": score.format.edits,
            "attempts": score.attempts,
            "parsed": score.parsed,
            "changed a file": score.changed,
            "solved": score.solved,
            "tokens per attempt": f"{score.generated_tokens:.0f}",
        }
        for score in result.scores
    ]
    for example in result.examples:
        say(f"--- attempt at {example.problem_id} in {example.format.title}: {example.ending}")
        say(example.text)
    say(f"--- formats of {checkpoint}, in {result.wall_seconds:.0f} seconds")
    for row in rows:
        say(", ".join(f"{name} {value}" for name, value in row.items()))
    best = result.best
    text = f'[harness]\ndialect = "{best.format.dialect}"\nedits = "{best.format.edits}"'
    solved = f"{best.solved} of {best.attempts} attempts solved"
    if best.parsed:
        say(f"recommended, with {solved}; put this into your recipe:\n{text}")
    else:
        say(
            "no format could be read; wanted a model that follows instructions, or more tokens per answer"
        )
    show_table(
        rows, key="formats", description=f"{checkpoint}; recommended: {best.format.title}, {solved}"
    )
    texts = [
        f"## {one.ending}: {one.problem_id}\n\n~~~~\n{one.text}\n~~~~" for one in result.examples
    ]
    show_markdown("\n\n".join(texts), key="format-attempts", description="whole attempts to read")
