"""`ostinato try`: finds the tool-call dialect and edit form that an imported model can write."""

from typing import Annotated

import typer

from ostinato.flows.commands.answers import CommandResult, answering
from ostinato.flows.commands.launching import (
    RecipeOption,
    SetOption,
    launch_flow,
    make_options,
)
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.checkpoints import refuse_unknown
from ostinato.infra.agent.extensions import DIALECTS
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.settings import load_settings


@answering
def try_formats(
    checkpoint: Annotated[
        str, typer.Argument(help="an imported model, or one trained from it: kind/name@version")
    ],
    dialects: Annotated[
        list[str] | None,
        typer.Option("--dialect", help="one more tool-call dialect to try; repeatable"),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(help="attempts in each format; the recipe's when absent", min=1)
    ] = None,
    recipe: RecipeOption = "short_repairs",
    settings: SetOption = None,
) -> CommandResult:
    """Tries the tool-call dialects and edit forms that a model may know, and recommends one. A recipe with a
    foreign harness program tries that program. Trains nothing.
    """
    # There is no --seed option, because with another seed the shipped problems would have to be rebuilt.
    with boundary(ConfigError, "--dialect"):
        DIALECTS.refuse_unknown(dialects or ())
    amount = [] if problems is None else [f"format_trial.problems={problems}"]
    options = make_options([*(settings or ()), *amount], None, None)
    loaded = load_recipe(recipe, overrides=options.overrides)
    refuse_unknown(load_settings(), loaded, [checkpoint])
    parameters = {"checkpoint": checkpoint, "dialects": dialects or []}
    result = launch_flow("format_trial", recipe, None, options, parameters)
    return CommandResult({"flow": "format_trial", "result": result}, lambda: None)
