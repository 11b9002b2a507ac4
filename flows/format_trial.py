"""Flow: tries tool-call dialects and edit forms with an imported model, each on the same problems. Trains nothing."""

from collections.abc import Sequence
from typing import get_args

from prefect import flow

from ostinato.flows.problem_building import problems_for
from ostinato.flows.stages import chain
from ostinato.flows.stages.artifacts import show_markdown, show_table
from ostinato.flows.stages.console import say
from ostinato.flows.stages.declared import FORMAT_TRIAL
from ostinato.flows.stages.forms import CheckpointName, Options, ProblemSet, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.agent.config import EditForm
from ostinato.infra.agent.dialects.published.choice import read_choice
from ostinato.infra.agent.extensions import BUILTIN, COMPACT, DIALECTS
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.tasks.evaluation.formats.config import (
    AnswerFormat,
    FormatAttempt,
    FormatScore,
    FormatTrialResult,
)


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
    harness = context.recipe.harness
    if dialects and not harness.is_builtin:
        raise ConfigError(
            f"dialects is {', '.join(dialects)} with harness.program {harness.program!r}, wanted none: a program "
            "has one form of its own"
        )
    chosen = context.checkpoint_named(checkpoint)
    directory = context.directory_of(chosen)
    if not chain.is_imported(directory):
        raise ConfigError(
            f"checkpoint {chosen} was trained in the {COMPACT} dialect, wanted an imported model"
        )
    made = context.make(
        FORMAT_TRIAL,
        {"problems": problems_for(context, problems, recipe, seed), "checkpoint": chosen},
        title=f"formats of {chosen}",
        formats=formats_to_try(read_choice(directory), dialects, harness.program),
        harness=chain.harness_for(context.recipe, directory),
        sandbox=context.recipe.rollout.sandbox,
        processes=context.settings.cpu_limit,
    )
    show_formats(str(chosen), chain.result_of(context, made, FormatTrialResult))
    return made


def formats_to_try(
    chosen: str, others: Sequence[str], program: str = BUILTIN
) -> tuple[AnswerFormat, ...]:
    """Formats to try: edits by tool in every dialect, and edits in a plain answer only in the chosen dialect, because
    they are not tool calls. A foreign program has only its own format.
    """
    if program != BUILTIN:
        return (AnswerFormat(dialect=chosen, program=program),)
    dialects = dict.fromkeys((chosen, *others))
    in_answers = [edits for edits in get_args(EditForm) if edits != "tool"]
    return (
        *(AnswerFormat(dialect=dialect) for dialect in dialects),
        *(AnswerFormat(dialect=chosen, edits=edits) for edits in in_answers),
    )


def show_formats(checkpoint: str, result: FormatTrialResult) -> None:
    """Prints and publishes a row per format, example attempts, and the recommended format as recipe text."""
    rows = [_row_of(score) for score in result.scores]
    for example in result.examples:
        say(
            f"--- attempt at {example.problem_id} in {example.format.title}: {_describe_ending(example)}"
        )
        say(f"{example.text}\n(ended: {example.reason})")
    say(f"--- formats of {checkpoint}, in {result.wall_seconds:.0f} seconds")
    for row in rows:
        say(", ".join(f"{name} {value}" for name, value in row.items()))
    best = result.best
    text = f'[harness]\ndialect = "{best.format.dialect}"\nedits = "{best.format.edits}"'
    solved = f"{best.solved} of {best.attempts} attempts solved"
    if not best.format.is_builtin:
        say(f"{best.format.title}: {solved}, {best.changed} changed a file")
    elif best.parsed:
        say(f"recommended, with {solved}; put this into your recipe:\n{text}")
    else:
        say(
            "no format could be read; wanted a model that follows instructions, or more tokens per answer"
        )
    show_table(
        rows, key="formats", description=f"{checkpoint}; best: {best.format.title}, {solved}"
    )
    texts = [
        f"## {_describe_ending(example)}: {example.problem_id}\n\n~~~~\n{example.text}\n~~~~"
        for example in result.examples
    ]
    show_markdown("\n\n".join(texts), key="format-attempts", description="whole attempts to read")


def _row_of(score: FormatScore) -> dict[str, object]:
    """A row of the table. A foreign program does not report whether it could parse an answer."""
    form = score.format
    read = {"dialect": form.dialect, "edits": form.edits, "parsed": score.parsed}
    return {
        **(read if form.is_builtin else {"program": form.program}),
        "attempts": score.attempts,
        "changed a file": score.changed,
        "solved": score.solved,
        "tokens per attempt": f"{score.generated_tokens:.0f}",
    }


def _describe_ending(attempt: FormatAttempt) -> str:
    is_known = attempt.format.is_builtin or attempt.ending in ("solved", "changed")
    return attempt.ending if is_known else "no file changed"
